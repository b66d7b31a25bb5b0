"""The files of a buffer: made, diagnosed, grown and removed."""
