"""Flow control over all shards, by limits, quotas and credits."""
