"""Draws the picture of `plot`, which shows a part of the history as charts."""
