"""The buffer classes. Each subpackage imports only the ones listed above it.

data_path   parts of a buffer, and the path of data through them
flow        consumers, reservations for rollouts, and published weights
calls       objects to which a buffer delegates its calls: writes, reads, items, saves
"""
