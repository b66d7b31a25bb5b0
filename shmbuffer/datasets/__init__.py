"""Opens data sets of other programs as buffers.

A data set has a name that begins with its source, such as ``"minari:door/human-v2"`` or
``"parquet:runs.parquet"``. A directory that a `ReadOnlyStorage` can read is mapped directly. Files
in other formats are converted once and then mapped.
"""
