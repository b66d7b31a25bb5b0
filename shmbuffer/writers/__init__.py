"""Writers, which choose the slots of new items."""
