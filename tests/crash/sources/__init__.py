"""Reads the sources for stores to shared memory and for the crash points between them."""
