"""Draws batches from all shards. A batch is begun, and finished when the shards have answered.

    begin    masses of the shards ─▶ counts ─▶ a message to each shard that draws
    finish   pieces ─▶ redraw missing pieces from other shards ─▶ weights ─▶ one batch

A learner can begin further batches before it finishes the first one, so that it does not wait for
the network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from shmbuffer.distributed.shards.member import Member, PendingPiece
from shmbuffer.distributed.shards.members import Members
from shmbuffer.distributed.shards.shard_pieces import Piece, join_parts
from shmbuffer.distributed.shards.shares import ShardMass, counts_of, effective_size, factors_of
from shmbuffer.errors import EmptyBufferError
from shmbuffer.samplers.rank import mixed
from shmbuffer.tensors.form import cpu

SHARD = "shard"
"""Key in a sample of the identity of each item's shard, int64 ``[n]``."""

EFFECTIVE_SIZE = "effective_sample_size"
"""Key in a prioritized sample's info; see `shares.effective_size`."""

Answer = Piece | PendingPiece | None
"""A piece, None if the shard is empty, or a piece that has been requested."""


class StartedBatch(NamedTuple):
    """A batch that was requested from the shards, but is not complete yet."""

    size: int  # number of items
    key: int  # key of the random number generator
    beta: float | None  # exponent of the importance weights; None without weights
    shares: dict[str, float]  # share of each node when the batch was begun
    asked: list[tuple[Member, int, Answer]]  # (shard, number of items, answer) for each shard


class ShardBatches:
    """Draws batches from all shards.

    Args:
        members: the client's view of the shards.
        face: result of `Shard.face`.
        home: name of the only node to draw from. If None, draws from all nodes.
    """

    def __init__(self, members: Members, face: dict[str, Any], home: str | None) -> None:
        self._members, self._home = members, home
        self._weight_keys: tuple[str, ...] = face["weight_keys"]
        self.largest = 0.0  # largest priority that a shard has reported or this client has set
        # called with the number of items that are drawn again because a shard was lost
        self.drawn_again: Callable[[int], None] = lambda count: None

    def begin(self, count: int, keys: list[int], beta: float | None) -> list[StartedBatch]:
        """Begins a batch for each key.

        Args:
            count: number of items in each batch.
            keys: keys of the random number generator.
            beta: exponent of the importance weights, or None for a buffer without weights.

        Raises:
            EmptyBufferError: no shard that answers has an item.
        """
        self._members.refresh()
        shares = self._shares(self._members.living())
        if not any(shares.values()):  # items may have been added since the last report
            self._members.refresh(all_of_them=True)
            shares = self._shares(self._members.living())
        for member in self._members.living():
            self.largest = max(self.largest, member.totals.max_priority or 0.0)
        asked = self._ask(shares, [(count, key) for key in keys], beta, 0)
        return [
            StartedBatch(count, key, beta, shares, one)
            for key, one in zip(keys, asked, strict=True)
        ]

    def _shares(self, members: list[Member]) -> dict[str, float]:
        """Returns the share of each shard, keyed by node.

        The share is the shard's mass. A shard without positive priorities has share 0 if another
        shard has some. If batches are drawn from one node, each shard with items has share 1.
        """
        if self._home is not None:
            return {one.node: 1.0 for one in members if one.totals.length}
        weighed = any(one.totals.length and not one.totals.is_uniform for one in members)
        return {
            one.node: 0.0 if weighed and one.totals.is_uniform else float(one.totals.mass)
            for one in members
        }

    def _ask(
        self,
        shares: dict[str, float],
        wanted: list[tuple[int, int]],
        beta: float | None,
        again: int,
    ) -> list[list[tuple[Member, int, Answer]]]:
        """Requests batches from the shards, with one message to each shard.

        Args:
            shares: share of each shard, keyed by node.
            wanted: size and key of each batch.
            beta: exponent of the importance weights, or None.
            again: number of earlier requests for the same batch, which changes the random numbers.

        Returns:
            For each batch, the shards that draw, with the number of items and the answer.
        """
        home = self._home
        able = self._drawable_shares(shares if home is None else {home: shares.get(home, 0.0)})
        if not able:
            missing = self._members.missing()
            raise EmptyBufferError(
                "Cannot sample from an empty buffer: write items into it first"
                + (f" ({missing})" if missing else "")
            )
        orders: dict[str, list[tuple[int, tuple[Any, ...]]]] = {}
        for at, (count, key) in enumerate(wanted):
            counts = counts_of(able, count, mixed(key, again))
            for part, (node, n) in enumerate(counts.items()):
                own = key if len(counts) == 1 and not again else mixed(key, 1 + part + again * 1024)
                orders.setdefault(node, []).append((at, (n, own, beta, self.largest)))
        asked: list[list[tuple[Member, int, Answer]]] = [[] for _ in wanted]
        for node, each in orders.items():
            member = self._members.at(node)
            assert member is not None
            answers = member.draw([order for _, order in each])
            for (at, (n, *_)), answer in zip(each, answers, strict=True):
                asked[at].append((member, n, answer))
        self._members.send_what_waits()
        return asked

    def _drawable_shares(self, shares: dict[str, float]) -> dict[str, float]:
        """Returns the positive shares of the shards that answer and have items."""
        found = {}
        for node, share in shares.items():
            member = self._members.at(node)
            if member is not None and member.lives and member.totals.length and share > 0:
                found[node] = share
        return found

    def finish(self, begun: StartedBatch) -> tuple[Any, dict[str, Any]]:
        """Waits for a batch, and returns its data, in random order, and its info.

        Items that do not arrive in time are drawn again from the other shards.
        """
        pieces, asked, again = [], begun.asked, 0
        while True:
            came = self._collect(asked)
            pieces += came
            left = begun.size - sum(n for _, n, _ in pieces)
            if not left:
                break
            again += 1
            self.drawn_again(left)
            try:
                (asked,) = self._ask(begun.shares, [(left, begun.key)], begun.beta, again)
            except EmptyBufferError:  # shards that have joined since may have items
                self.drawn_again(begun.size - left)
                return self.finish(*self.begin(begun.size, [begun.key], begun.beta))
        return self._join(begun, pieces)

    def _collect(self, asked: list[tuple[Member, int, Answer]]) -> list[tuple[Member, int, Piece]]:
        """Waits for the requested pieces, and returns the pieces that arrive in time.

        Returns:
            The shard, the number of items and the piece, for each piece.
        """
        coming = {one.sent: member for member, _, one in asked if isinstance(one, PendingPiece)}
        for member, sent in self._members.collect(coming):
            _learn(member, sent.result[1][-1])
        came = []
        for member, n, answer in asked:
            piece: Piece | None
            if isinstance(answer, PendingPiece):
                if answer.sent.result is None:  # the shard was lost
                    continue
                piece = answer.sent.result[1][answer.at]
            else:
                piece = answer
                _learn(member, piece)
            if piece is not None:
                came.append((member, n, piece))
        return came

    def _join(
        self, begun: StartedBatch, pieces: list[tuple[Member, int, Piece]]
    ) -> tuple[Any, dict[str, Any]]:
        """Joins the pieces of a batch, and returns the data and the info of the batch."""
        infos = self._weigh(begun, pieces)
        for info, (_, n, piece) in zip(infos, pieces, strict=True):
            info[SHARD] = cpu.full((n,), piece.identity, dtype=torch.int64)
        if len(pieces) == 1 and begun.asked[0][2] is pieces[0][2]:  # drawn in memory, so no copy
            data, info = pieces[0][2].data, infos[0]
        else:
            places = None
            if len(pieces) > 1:  # shuffled, so that any part of a batch is a random sample too
                random = np.random.Generator(np.random.Philox(key=begun.key))
                order = torch.from_numpy(random.permutation(begun.size))
                places = torch.split(order, [n for _, n, _ in pieces])
            data = join_parts([piece.data for _, _, piece in pieces], places)
            info = join_parts(infos, places)
        first = self._weight_keys[0]
        if first in info:
            info.update(dict.fromkeys(self._weight_keys, info[first]))
            info[EFFECTIVE_SIZE] = effective_size(info[first])
        return data, info

    def _weigh(
        self, begun: StartedBatch, pieces: list[tuple[Member, int, Piece]]
    ) -> list[dict[str, Any]]:
        """Returns the info of each piece, with the weights corrected for all shards.

        Only the first key for weights is kept.
        """
        infos = [dict(piece.info) for _, _, piece in pieces]
        first, *others = self._weight_keys
        for info in infos:
            for key in others:
                info.pop(key, None)
        if begun.beta is None or first not in infos[0]:
            return infos
        drawn = [
            ShardMass(begun.shares[one.node], piece.totals.mass, piece.totals.least)
            for one, _, piece in pieces
        ]
        nodes = {one.node for one, _, _ in pieces}
        living = self._members.living()
        shares = self._shares(living)
        rest = [
            ShardMass(shares[one.node], one.totals.mass, one.totals.least)
            for one in living
            if one.node not in nodes and one.totals.length and shares[one.node] > 0
        ]
        for info, factor in zip(infos, factors_of(drawn, rest, begun.beta), strict=True):
            if factor != 1.0:
                info[first] = info[first] * factor
        return infos


def _learn(member: Member, piece: Piece | None) -> None:
    """Records the state that a shard has sent with a piece, or that it is empty if None."""
    if piece is None:
        member.is_empty()
    else:
        member.learn(piece.totals, piece.identity)
