"""Classes that implement the calls of `ReplayBuffer`, one class for each kind of call."""
