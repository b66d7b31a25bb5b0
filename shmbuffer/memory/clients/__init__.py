"""The processes that use a buffer: their file locks, registry entries and unfinished rollouts."""
