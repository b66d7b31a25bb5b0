"""Recording of environment steps as transitions in a buffer."""
