"""The priorities of a sampler: where they are, and how they change."""
