"""Tests of the clients without torch."""
