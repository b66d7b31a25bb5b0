"""Reads the sources for stores to shared memory and the crash points between them."""
