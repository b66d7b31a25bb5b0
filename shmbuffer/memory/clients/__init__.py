"""Management of the processes that use a buffer: locks, registry entries, unfinished rollouts."""
