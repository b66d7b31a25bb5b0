"""The files of a buffer as processes map them: control, slots, weights, and what they record."""
