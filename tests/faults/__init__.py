"""Faults of the machine: each libc call on a buffer's files fails, once or from then on."""
