"""Writers, which choose the places of new items, one per module."""
