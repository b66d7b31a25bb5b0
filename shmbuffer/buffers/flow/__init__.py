"""Items for consumers, room for rollouts, weights for collectors."""
