"""Maps the files of a buffer: control, slots and weights, and the settings that they record."""
