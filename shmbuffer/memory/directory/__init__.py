"""The files of a buffer: creation, diagnosis, growth and removal."""
