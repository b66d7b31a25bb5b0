"""Beyond one machine. Optional dependencies, imported on use."""
