"""Records that were read, until somebody says in which form they are wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmbuffer.replay.form.batches import stack_lazily

if TYPE_CHECKING:
    from shmbuffer.memory import RecordBatch
    from shmbuffer.replay.records.decoder import Decoder


class Fetched:
    """Several items as they lie in a byte ring: a copy of their bytes, each of them validated.

    What comes out may lie in these bytes, so it is asked for once.

    Args:
        batch: the records.
        decoder: makes items of them.
    """

    def __init__(self, batch: RecordBatch, decoder: Decoder) -> None:
        self.batch = batch
        self.decoder = decoder

    def __len__(self) -> int:
        """How many there are."""
        return len(self.batch)

    def items(self) -> list[Any]:
        """One by one."""
        return self.decoder.items(self.batch)

    def stacked(self, dim: int) -> Any:
        """As a lazy stack, whose items are made when somebody looks at them."""
        stack = self.decoder.stack(self.batch, dim)
        return stack_lazily(self.items(), dim, fresh=True) if stack is None else stack

    def dense(self) -> Any:
        """As one batch of their form; None where they differ in form or in the shape of a leaf."""
        return self.decoder.dense(self.batch)
