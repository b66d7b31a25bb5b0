"""The exhaustive small model of the slot protocol."""
