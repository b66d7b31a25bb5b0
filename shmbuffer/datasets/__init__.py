"""Data sets of other programs, opened as buffers by a name that begins with their source.

``"minari:door/human-v2"``, ``"parquet:runs.parquet"``; or the directory that a `ReadOnlyStorage`
opens. Files of another form are converted once, and mapped from there.
"""
