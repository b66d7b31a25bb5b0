"""Power cuts, played: what is on the disk when the machine stops, and what is made of it.

record     a process runs; pages, names and syncs are noted at each of its crash points
cut        at one step, any page may be as old as its last sync, or torn; any name likewise
start      the image is opened under another boot id, and held to what was promised
"""
