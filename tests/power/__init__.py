"""Simulated power cuts: which images of the disk may result, and how the library opens them.

record     a process runs; pages, names and syncs are noted at each of its crash points
cut        at one step, any page may be as old as its last sync, or torn; any name likewise
start      the image is opened under another boot id, and checked against the guarantees
"""
