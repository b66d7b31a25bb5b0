"""Inspects a buffer repeatedly for `top`, and shows the results as tables or on a terminal."""
