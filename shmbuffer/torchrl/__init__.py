"""What TorchRL has beside its buffers: the files that it writes, TED, transforms, functions."""
