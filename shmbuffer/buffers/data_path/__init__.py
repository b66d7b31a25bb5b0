"""The parts of a buffer, and the path of data through them."""
