"""The C core, which consists of one extension module: ``_core``.

Its functions take addresses and sizes of memory, and the mapped control file of a buffer.
"""
