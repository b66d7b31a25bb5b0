"""Flow control over all shards: limits, quotas and credits."""
