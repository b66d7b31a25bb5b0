"""A batch of items of all shards: begun, and finished when the shards have answered.

    begin    a picture of the shards ─▶ counts by mass ─▶ a message to each that draws
    finish   pieces ─▶ what did not come is drawn again from the others ─▶ weights ─▶ one batch

Between the two other batches may be begun, so that a learner need not wait for the wire.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from shmbuffer.distributed.shards.member import Coming, Member, told
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


Answer = Piece | Coming | None
"""A piece that was drawn here, None of an empty shard; or one that is on its way."""


class Begun(NamedTuple):
    """A batch that is being drawn."""

    size: int
    key: int
    beta: float | None
    shares: dict[str, float]
    """What each shard was given a part of the batch by, by its node."""
    asked: list[tuple[Member, int, Answer]]
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
        self.drawn_again: Callable[[int], None] = lambda count: None  # for shards that are gone

    def begin(self, count: int, keys: list[int], beta: float | None) -> list[Begun]:
        """Have the shards draw batches, with one message to each.

        Args:
            count: items of a batch.
            keys: 63 bits each that decide a batch.
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
        asked = self._ask(shares, [(count, key) for key in keys], beta, 0)
        return [Begun(count, key, beta, shares, one) for key, one in zip(keys, asked, strict=True)]

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
        self,
        shares: dict[str, float],
        wanted: list[tuple[int, int]],
        beta: float | None,
        again: int,
    ) -> list[list[tuple[Member, int, Answer]]]:
        """Have batches, or what is missing of them, drawn by those that live and have items.

        Args:
            shares: what each shard is given a part by.
            wanted: items and key of each batch.
            beta: exponent of the weights.
            again: how often some of a batch did not come.
        """
        home = self._home
        able = self._able(shares if home is None else {home: shares.get(home, 0.0)})
        if not able:
            missing = self._members.missing()
            raise EmptyBufferError(
                "Cannot sample from an empty buffer: write something into it first"
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
            self.drawn_again(left)
            try:
                (asked,) = self._ask(begun.shares, [(left, begun.key)], begun.beta, again)
            except EmptyBufferError:  # of those there were when it was begun
                self.drawn_again(begun.size - left)
                return self.finish(*self.begin(begun.size, [begun.key], begun.beta))
        return self._joined(begun, pieces)

    def _collected(
        self, asked: list[tuple[Member, int, Answer]]
    ) -> list[tuple[Member, int, Piece]]:
        """The pieces that came."""
        replies = {
            answer.reply.sent: (member, answer.reply)
            for member, _, answer in asked
            if isinstance(answer, Coming) and answer.reply.pieces is None
        }
        waiting = [(member, sent) for sent, (member, _) in replies.items()]
        for member, sent, message in self._members.answers(waiting):
            _, pieces = told(message)
            replies[sent][1].pieces = pieces
            _learn(member, pieces[-1])
        came = []
        for member, n, answer in asked:
            piece: Piece | None
            if isinstance(answer, Coming):
                if answer.reply.pieces is None:  # it was lost
                    continue
                piece = answer.reply.pieces[answer.at]
            else:
                piece = answer
                _learn(member, piece)
            if piece is not None:
                came.append((member, n, piece))
        return came

    def _joined(
        self, begun: Begun, pieces: list[tuple[Member, int, Piece]]
    ) -> tuple[Any, dict[str, Any]]:
        infos = self._weighed(begun, pieces)
        for info, (_, n, piece) in zip(infos, pieces, strict=True):
            info[SHARD] = torch.full((n,), piece.identity)
        if len(pieces) == 1 and begun.asked[0][2] is pieces[0][2]:  # drawn here
            data, info = pieces[0][2].data, infos[0]
        else:
            places = None  # in random order, because a part of a batch is a sample, too
            if len(pieces) > 1:
                random = np.random.Generator(np.random.Philox(key=begun.key))
                order = torch.from_numpy(random.permutation(begun.size))
                places = torch.split(order, [n for _, n, _ in pieces])
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


def _learn(member: Member, piece: Piece | None) -> None:
    """Take in what the last piece says of its shard."""
    if piece is None:
        member.is_empty()
    else:
        member.learn(piece.totals, piece.identity)
