"""Operations on the ring of a buffer: writes, samples, priorities and snapshots of items."""
