"""A batch of items of all shards: begun, and finished when the shards have answered.

    begin    a picture of the shards ─▶ counts by mass ─▶ a message to each that draws
    finish   pieces ─▶ what did not come is drawn again from the others ─▶ weights ─▶ one batch

Between the two other batches may be begun, so that a learner need not wait for the wire.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from shmbuffer.distributed.shards.member import Member, told
from shmbuffer.distributed.shards.members import Members
from shmbuffer.distributed.shards.pieces import Piece, joined
from shmbuffer.distributed.shards.shares import (
    Weighed,
    counts_of,
    effective_size,
    factors_of,
)
from shmbuffer.errors import EmptyBufferError
from shmbuffer.replay.samplers.rank import mixed

SHARD = "shard"
"""The entry of a sample that says which shard an item is from: int64 ``[n]``."""

EFFECTIVE_SIZE = "effective_sample_size"
"""The entry of the info of a prioritized sample that says how many items of equal weight it is."""


class Begun(NamedTuple):
    """A batch that is being drawn."""

    size: int
    key: int
    beta: float | None
    shares: dict[str, float]
    """What each shard was given a part of the batch by, by its node."""
    asked: list[tuple[Member, int, Any]]
    """Who draws how many, and the piece, or what will be it."""


class Batches:
    """Draws batches.

    Args:
        members: the shards.
        face: what the buffers of the shards say of themselves; see `keeper.face_of`.
        home: name of the own node, where items are drawn from it alone; else None.
    """

    def __init__(self, members: Members, face: dict[str, Any], home: str | None) -> None:
        self._members, self._home = members, home
        self._weight_keys: tuple[str, ...] = face["weight_keys"]
        self.largest = 0.0  # priority seen anywhere

    def begin(self, count: int, key: int, beta: float | None) -> Begun:
        """Have the shards draw.

        Args:
            count: items.
            key: 63 bits that decide.
            beta: exponent of the weights; None: there are none.

        Raises:
            EmptyBufferError: nothing to draw from.
        """
        self._members.refresh()
        shares = self._shares(self._members.living())
        if not any(shares.values()):  # as far as is known: somebody may have written since
            self._members.refresh(all_of_them=True)
            shares = self._shares(self._members.living())
        for member in self._members.living():
            self.largest = max(self.largest, member.totals.max_priority or 0.0)
        return Begun(count, key, beta, shares, self._ask(shares, count, key, beta, 0))

    def _shares(self, members: list[Member]) -> dict[str, float]:
        """What each of them is given a part of a batch by."""
        if self._home is not None:
            return {one.node: 1.0 for one in members if one.totals.length}
        weighed = any(one.totals.length and not one.totals.is_uniform for one in members)
        return {
            one.node: 0.0 if weighed and one.totals.is_uniform else float(one.totals.mass)
            for one in members
        }

    def _ask(
        self, shares: dict[str, float], count: int, key: int, beta: float | None, again: int
    ) -> list[tuple[Member, int, Any]]:
        """Have ``count`` items drawn by those shards that live and have some."""
        home = self._home
        able = self._able(shares if home is None else {home: shares.get(home, 0.0)})
        if not able:
            missing = self._members.missing()
            raise EmptyBufferError(
                "Cannot sample from an empty buffer: write something into it first"
                + (f" ({missing})" if missing else "")
            )
        counts = counts_of(able, count, mixed(key, again))
        asked = []
        for at, (node, n) in enumerate(counts.items()):
            member = self._members.at(node)
            assert member is not None
            own = key if len(counts) == 1 and not again else mixed(key, 1 + at + again * 1024)
            asked.append((member, n, member.draw(n, own, beta, self.largest)))
        self._members.send_what_waits()
        return asked

    def _able(self, shares: dict[str, float]) -> dict[str, float]:
        """Those of them that have items, as far as is known."""
        found = {}
        for node, share in shares.items():
            member = self._members.at(node)
            if member is not None and member.lives and member.totals.length and share > 0:
                found[node] = share
        return found

    def finish(self, begun: Begun) -> tuple[Any, dict[str, Any]]:
        """The batch, its items in random order, and its info.

        What a shard does not send, because it died or took too long, the others draw.

        Raises:
            EmptyBufferError: no shard that answers has an item any more.
        """
        pieces, asked, again = [], begun.asked, 0
        while True:
            came = self._collected(asked)
            pieces += came
            left = begun.size - sum(n for _, n, _ in pieces)
            if not left:
                break
            again += 1
            try:
                asked = self._ask(begun.shares, left, begun.key, begun.beta, again)
            except EmptyBufferError:  # of those there were when it was begun
                return self.finish(self.begin(begun.size, begun.key, begun.beta))
        return self._joined(begun, pieces)

    def _collected(self, asked: list[tuple[Member, int, Any]]) -> list[tuple[Member, int, Piece]]:
        """The pieces that came."""
        came, sent = [], {}
        for member, n, answer in asked:
            if isinstance(answer, Piece):
                came.append((member, n, answer))
            elif answer is None:  # it was emptied meanwhile
                member.is_empty()
            else:
                sent[answer] = member, n
        waiting = [(member, ref) for ref, (member, _) in sent.items()]
        for member, ref, message in self._members.answers(waiting):
            _, piece = told(message)
            if piece is None:
                member.is_empty()
            else:
                came.append((member, sent[ref][1], piece))
        for member, _, piece in came:
            member.learn(piece.totals, piece.identity)
        return came

    def _joined(
        self, begun: Begun, pieces: list[tuple[Member, int, Piece]]
    ) -> tuple[Any, dict[str, Any]]:
        infos = self._weighed(begun, pieces)
        for info, (_, n, piece) in zip(infos, pieces, strict=True):
            info[SHARD] = torch.full((n,), piece.identity)
        if (
            len(pieces) == 1 and begun.asked[0][2] is pieces[0][2]
        ):  # drawn here, not in Ray's memory
            data, info = pieces[0][2].data, infos[0]
        else:
            places = None  # in random order, because a part of a batch is a sample, too
            if len(pieces) > 1:
                random = np.random.Generator(np.random.Philox(key=begun.key))
                places = torch.from_numpy(random.permutation(begun.size))
            data = joined([piece.data for _, _, piece in pieces], places)
            info = joined(infos, places)
        first = self._weight_keys[0]
        if first in info:
            info.update(dict.fromkeys(self._weight_keys, info[first]))
            info[EFFECTIVE_SIZE] = effective_size(info[first])
        return data, info

    def _weighed(
        self, begun: Begun, pieces: list[tuple[Member, int, Piece]]
    ) -> list[dict[str, Any]]:
        """What is known of each piece; its weights, under one name, are those among all shards."""
        infos = [dict(piece.info) for _, _, piece in pieces]
        first, *others = self._weight_keys
        for info in infos:
            for key in others:
                info.pop(key, None)
        if begun.beta is None or first not in infos[0]:
            return infos
        drawn = [
            Weighed(begun.shares[one.node], piece.totals.mass, piece.totals.least)
            for one, _, piece in pieces
        ]
        nodes = {one.node for one, _, _ in pieces}
        living = self._members.living()
        shares = self._shares(living)
        rest = [
            Weighed(shares[one.node], one.totals.mass, one.totals.least)
            for one in living
            if one.node not in nodes and one.totals.length and shares[one.node] > 0
        ]
        for info, factor in zip(infos, factors_of(drawn, rest, begun.beta), strict=True):
            if factor != 1.0:
                info[first] = info[first] * factor
        return infos
