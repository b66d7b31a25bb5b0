"""Inspects a buffer repeatedly for the command `top`, and displays the results."""
