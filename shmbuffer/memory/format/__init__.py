"""The format of a buffer: the meaning of all bytes that processes share."""
