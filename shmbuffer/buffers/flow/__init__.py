"""What a buffer gives to whom: items to consumers, room to rollouts, weights to collectors."""
