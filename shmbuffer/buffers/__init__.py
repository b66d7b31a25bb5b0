"""The buffer classes. Each subpackage imports only from those listed above it.

data_path   the storage, sampler, writer and transforms of a buffer, and the path of data through
            them
flow        consumers, reservations for rollouts, and published weights
calls       objects to which a buffer delegates its calls: writes, reads, items, saves
"""
