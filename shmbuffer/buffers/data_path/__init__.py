"""The parts of a buffer, and the way of data through them."""
