"""The C core: one extension module, ``_core``, that sees pointers, sizes and the control file."""
