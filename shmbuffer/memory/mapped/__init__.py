"""Maps the files of a buffer (control, slots and weights), and reads the recorded settings."""
