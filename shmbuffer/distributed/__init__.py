"""Buffers for several machines. The optional dependencies are imported on first use."""
