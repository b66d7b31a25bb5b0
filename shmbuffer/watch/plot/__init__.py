"""Draws the picture of the command `plot`, which shows the history of a buffer as charts."""
