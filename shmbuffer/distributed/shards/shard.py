"""Answers requests for a shard in its keeper's process, and draws items for other nodes.

    Keeper ──▶ Shard ──▶ buffer in <scratch_dir>/<node>

If the keeper dies, Ray restarts it on the same node, and the new keeper recovers the directory. If
the directory is removed, the keeper exits, and Ray restarts it with a new directory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmbuffer.buffers.data_path.sample_info import stack_dim_of
from shmbuffer.buffers.replay_buffer import ReplayBuffer
from shmbuffer.distributed.nearby import engine_of
from shmbuffer.distributed.owner import Owner
from shmbuffer.distributed.shards.flow.bank import BankState
from shmbuffer.distributed.shards.flow.quota import KeeperReply, Vault
from shmbuffer.distributed.shards.shard_pieces import Piece, apply_update, draw_pieces, news_of
from shmbuffer.errors import BufferUnlinkedError, RateLimitError
from shmbuffer.memory import Totals
from shmbuffer.samplers.priority.prioritized import PrioritizedSampler
from shmbuffer.watch.shards import NODE


class Shard(Owner):
    """Answers the requests of a shard's clients.

    Args:
        buffer: the shard's buffer.
        dumps: function that pickles the buffer's configuration.
        node: name of the shard's node.
    """

    fatal = (BufferUnlinkedError,)

    def __init__(self, buffer: ReplayBuffer, dumps: Callable[[Any], bytes], node: str) -> None:
        super().__init__(buffer, dumps)
        self._node, self._vault = node, Vault(node)
        engine_of(buffer).update_settings(extra={NODE: node})

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a method of the buffer; see `Owner.call`. Records a refusal by the rate limiter."""
        try:
            return super().call(name, args, kwargs)
        except RateLimitError:
            self._vault.note_refusal(self.buffer)
            raise

    def flow(self, bank: int, state: BankState | None, order: str | int) -> KeeperReply:
        """Carries out an order from the map's flow control; see `Vault.obey`."""
        return self._vault.obey(self.buffer, bank, state, order)

    def step(
        self, updates: list[Any], orders: list[tuple[Any, ...]]
    ) -> tuple[list[tuple[int, int, int]], list[Piece | None]]:
        """Applies priority updates, then draws pieces of batches.

        Args:
            updates: for each update, the arguments of `apply_update` after the node.
            orders: for each piece, the arguments of `draw_piece` after the node.

        Returns:
            The results of `apply_update`, and the result of `draw_pieces`.
        """
        found = [apply_update(self.buffer, self._node, *update) for update in updates]
        return found, draw_pieces(self.buffer, self._node, orders)

    def news(self) -> tuple[int | None, Totals, int]:
        """Returns the identity, the totals and the capacity of the shard; see `news_of`."""
        return news_of(self.buffer, self._node)

    def face(self) -> dict[str, Any]:
        """Returns the properties of the buffer that a client needs for sampling."""
        buffer = self.buffer
        sampler: Any = buffer.sampler
        prioritized = isinstance(sampler, PrioritizedSampler)
        return {
            "batch_size": buffer.batch_size,
            "priority_key": buffer._parts.priority_key,
            "weight_keys": buffer._parts.weight_keys,
            "samples_tensordicts": buffer._parts.mapping == "tensordict",
            "stack_dim": stack_dim_of(buffer.storage),
            "beta": sampler.beta if prioritized else None,
            "reduction": sampler.reduction if prioritized else "max",
        }
