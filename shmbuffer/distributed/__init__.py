"""Buffers that several machines share. Optional dependencies are imported on first use."""
