"""The mapped files of a buffer: control, slots and weights files, and the stored settings."""
