"""Priority updates for items in several shards, and their results."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shmbuffer.distributed.shards.member import Member, Sent, Update
from shmbuffer.distributed.shards.members import Members
from shmbuffer.memory.format.array_types import Floats, Ints


class ShardedUpdate:
    """Numbers of priorities that were applied, stale and lost.

    Priorities for other nodes are sent together with the next draw from these nodes. Reading one of
    the numbers sends them immediately and waits for the answers, at most ``answer_timeout``
    seconds.
    """

    def __init__(
        self, members: Members, known: tuple[int, int, int], sent: list[tuple[Member, Update]]
    ) -> None:
        self._members, self._known, self._sent = members, known, sent

    @property
    def applied(self) -> int:
        """Number of priorities that were set."""
        return self._settled()[0]

    @property
    def stale(self) -> int:
        """Number of priorities discarded because the item was overwritten after it was sampled."""
        return self._settled()[1]

    @property
    def lost(self) -> int:
        """Number of priorities for shards that did not answer. The update can be repeated."""
        return self._settled()[2]

    def _settled(self) -> tuple[int, int, int]:
        """Waits for the results, and returns the numbers applied, stale and lost."""
        sent, self._sent = self._sent, []
        asked: dict[Sent, Member] = {}
        for member, update in sent:
            if update.found is None:
                if update.answer is None:
                    member.flush()
                assert update.answer is not None
                asked[update.answer[0]] = member
        self._members.collect(asked)
        for _, update in sent:
            found = update.result()
            self._known = tuple(map(sum, zip(self._known, found, strict=True)))  # type: ignore[assignment]
        return self._known

    def __iter__(self) -> Iterator[int]:
        return iter(self._settled())

    def __repr__(self) -> str:
        applied, stale, lost = self._settled()
        return f"{type(self).__name__}(applied={applied}, stale={stale}, lost={lost})"


def send_updates(
    members: Members, shards: Ints, index: Ints, raw: Floats, tickets: Ints | None
) -> ShardedUpdate:
    """Sets priorities of items in several shards.

    Shards on this node are updated immediately, other shards by the next message to them.

    Args:
        members: the client's view of the shards.
        shards: identity of each item's shard, ``[n]``.
        index: index of each item within its shard, ``[n]`` or ``[n, ndim]``.
        raw: priority of each item, ``[n]``.
        tickets: generation of each item, ``[n]``, or None to update without a check.
    """
    known, sent, lost = members.by_identity(), [], 0
    for number in np.unique(shards).tolist():
        rows = np.flatnonzero(shards == number)
        member = known.get(number)
        if member is None or not member.lives:
            lost += len(rows)
            continue
        generation = None if tickets is None else tickets[rows]
        sent.append((member, Update(number, index[rows], raw[rows], generation)))
    for member, update in sent:
        member.update(update)
    return ShardedUpdate(members, (0, 0, lost), sent)
