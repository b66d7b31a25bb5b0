"""Opens data sets of other programs as buffers, by a name that begins with the source.

Examples are ``"minari:door/human-v2"`` and ``"parquet:runs.parquet"``. The name can also be a
directory for a `ReadOnlyStorage`. Files of other formats are converted once and then mapped.
"""
