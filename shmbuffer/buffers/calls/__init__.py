"""The calls of a buffer: a class for each kind, of which `ReplayBuffer` is made."""
