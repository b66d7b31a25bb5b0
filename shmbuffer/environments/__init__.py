"""Records the steps of environments as transitions in a buffer."""
