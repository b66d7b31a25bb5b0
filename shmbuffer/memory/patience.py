"""How long a call waits for others before it says who is in its way."""

from __future__ import annotations

#: For the mutex, which living processes hold for microseconds.
LOCK_TIMEOUT_NS = 5_000_000_000
#: Of a write, for a slot or for bytes that a living writer is filling.
WRITE_TIMEOUT_S = 5.0
