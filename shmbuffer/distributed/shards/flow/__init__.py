"""Flow control over all shards: the ratio of samples to inserts, with quotas and credits."""
