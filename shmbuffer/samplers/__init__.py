"""Samplers, which choose the items of a batch, one per module."""
