"""Writers, which choose the slots of new items. Each module has one writer or a shared part."""
