"""Who has to wait for whom: the limiter, reservations, consumers, and waiting itself."""
