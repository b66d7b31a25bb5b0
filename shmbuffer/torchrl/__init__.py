"""The rest of TorchRL's family: the files that it writes, TED, transforms, functions."""
