"""A client's picture of the shards: who lives, what each weighs, and how it is asked.

    Member   one shard: in memory on its own node, else its keeper by Ray
    Members  all of them, by their nodes; the map is asked now and then, and never waited for

A shard whose keeper has died, or does not answer in time, counts as empty until it answers again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from shmbuffer.distributed.host import opened
from shmbuffer.distributed.nearby import SAMPLE, WRITE
from shmbuffer.distributed.ray import RayClient
from shmbuffer.distributed.shards.keeper import updated
from shmbuffer.distributed.shards.message import unpacked
from shmbuffer.distributed.shards.pieces import identity_in, piece_of, ring_in
from shmbuffer.errors import EmptyBufferError
from shmbuffer.memory import Totals

FRESH_S = 0.1
"""How old the picture of a shard may be when a batch is drawn by it."""

MAX_SENT = 64
"""Messages with priorities alone that may be on their way to one shard."""

PROBE_S = 0.5
"""How often a shard that does not answer, and the map, are asked again."""

_NOTHING = Totals(0.0, 0.0, None, 0)

_log = logging.getLogger(__name__)


class Update:
    """Priorities of items of one shard, and what became of them."""

    __slots__ = ("answer", "found", "given")

    def __init__(self, shard: int, index: Any, priority: Any, generation: Any) -> None:
        self.given = shard, index, priority, generation
        self.found: tuple[int, int, int] | None = None  # applied, stale, lost
        self.answer: tuple[Any, int] | None = None  # the message that will say it, and where


class Member:
    """One shard.

    Args:
        node: name of its node.
        keeper: the actor there.
        where: the buffer's name, for messages.
        offer: where the buffer is, if that is known.
    """

    def __init__(self, node: str, keeper: Any, where: str) -> None:
        self.node, self.keeper, self._where = node, keeper, where
        self.handle = RayClient(keeper, has_gpu=False)
        self.identity: int | None = None
        self.totals = _NOTHING
        self.capacity = 0
        self.seen = -FRESH_S
        self.lives = True
        self._probe: Any = None
        self._probed = 0.0
        self.sent: list[Any] = []  # messages with priorities alone, not known to have arrived
        self._waiting: list[Update] = []

    def near(self, group: str) -> Any:
        """The shard's buffer in this process; None where it is not to be had."""
        try:
            reached = self.handle._reach(group)
        except self.handle.owner_is_gone:
            return None
        return None if reached is None else reached.buffer

    def can_write(self) -> bool:
        """Whether it is asked to write: it is here, or its keeper answers."""
        return self.lives or self.near(WRITE) is not None

    def is_empty(self) -> None:
        """It has no items any more."""
        self.learn(_NOTHING._replace(max_priority=self.totals.max_priority), None)

    def learn(self, totals: Totals, identity: int | None) -> None:
        """Take in what the shard says of itself."""
        if not self.lives:
            _log.info("%s: the shard of node %s answers again", self._where, self.node)
        self.lives, self.totals, self.seen = True, totals, time.monotonic()
        if identity is not None:
            self.identity = identity

    def lose(self, why: str) -> None:
        """Count it as empty until it answers."""
        if self.lives:
            _log.warning(
                "%s: the shard of node %s does not answer (%s); its %d items are left out until it "
                "does",
                *(self._where, self.node, why, self.totals.length),
            )
        self.lives, self.totals, self._probe = False, _NOTHING, None
        self._probed = time.monotonic()

    def look(self) -> bool:
        """What it weighs now, where that can be read in memory; whether it could."""
        buffer = self.near(SAMPLE)
        if buffer is None:
            return False
        try:
            totals = ring_in(buffer).totals()
        except EmptyBufferError:
            return False
        self.capacity = buffer.storage.max_size
        self.learn(totals, identity_in(buffer, self.node))
        return True

    def take_news(self, answer: Any) -> None:
        """Take in what the keeper says."""
        identity, totals, self.capacity = answer
        self.learn(totals, identity)

    def probe(self, ray: Any) -> None:
        """Ask a shard that does not answer, without waiting for it."""
        if self._probe is None:
            if time.monotonic() - self._probed >= PROBE_S:
                self._probed = time.monotonic()
                self._probe = self.keeper.news.remote()
            return
        if ray.wait([self._probe], timeout=0)[0]:
            answer, self._probe = self._probe, None
            try:
                self.take_news(told(ray.get(answer)))
            except ray.exceptions.RayError:
                return  # it is asked again

    def draw(self, count: int, key: int, beta: float | None, largest: float) -> Any:
        """A `Piece`, where it is drawn here, None of an empty shard; else Ray's reference."""
        buffer = self.near(SAMPLE)
        if buffer is None:
            return self._step((count, key, beta, largest))
        try:
            return piece_of(buffer, self.node, count, key, beta, largest)
        except EmptyBufferError:
            return None

    def update(self, update: Update) -> None:
        """Set priorities: now, where it is near; else with the next message to the keeper."""
        buffer = self.near(SAMPLE)
        if buffer is not None:
            update.found = updated(buffer, self.node, *update.given)
            return
        self.flush()
        self._waiting.append(update)

    def flush(self) -> None:
        """Send what waits for the next message."""
        if self._waiting:
            self.sent.append(self._step(None))

    def _step(self, order: tuple[Any, ...] | None) -> Any:
        """A message to the keeper, with the priorities that wait for one."""
        waiting, self._waiting = self._waiting, []
        answer = self.keeper.step.remote([update.given for update in waiting], order)
        for at, update in enumerate(waiting):
            update.answer = answer, at
        return answer


class Members:
    """All shards.

    Args:
        ray: the module.
        shard_map: the actor.
        find_map: finds the actor by its name, where the one that is known has died.
        where: the buffer's name, for messages.
        timeout: seconds that a shard may take to answer.
    """

    def __init__(self, ray: Any, find_map: Callable[[], Any], where: str, timeout: float) -> None:
        self._ray, self._find_map, self._where = ray, find_map, where
        self.timeout = timeout
        self._members: dict[str, Member] = {}
        self._asked: Any = None
        self._asked_at = 0.0
        self._map = find_map()
        self._take(ray.get(self._map.keepers.remote(), timeout=timeout))

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def living(self) -> list[Member]:
        """Those that answer."""
        return [member for member in self if member.lives]

    def missing(self) -> str:
        """The nodes whose shards do not answer, for messages; empty if all do."""
        nodes = [member.node for member in self if not member.lives]
        return f"no answer from the shards of {', '.join(nodes)}" if nodes else ""

    def at(self, node: str) -> Member | None:
        """The shard of a node."""
        return self._members.get(node)

    def by_identity(self) -> dict[int, Member]:
        """Those whose identity is known."""
        return {one.identity: one for one in self if one.identity is not None}

    def refresh(self, *, all_of_them: bool = False) -> None:
        """Have a picture of each shard that is not too old; waits for one round trip at most."""
        self._follow_map()
        if all_of_them:
            self.send_what_waits()
        now, asked = time.monotonic(), []
        for member in self:
            if not member.lives:
                member.probe(self._ray)
            elif (all_of_them or now - member.seen > FRESH_S) and not member.look():
                asked.append((member, member.keeper.news.remote()))
        for member, _, answer in self.answers(asked):
            member.take_news(told(answer))

    def answers(self, asked: Iterable[tuple[Member, Any]]) -> Iterator[tuple[Member, Any, Any]]:
        """The messages of the shards, of those that answer; the others are lost."""
        ray, waiting = self._ray, {ref: member for member, ref in asked}
        if not waiting:
            return
        ready, late = ray.wait(list(waiting), num_returns=len(waiting), timeout=self.timeout)
        for ref in late:
            waiting[ref].lose(f"no answer within {self.timeout:g} s")
        for ref in ready:
            try:
                answer = ray.get(ref)
            except ray.exceptions.RayError as error:
                waiting[ref].lose(type(error).__name__)
                continue
            yield waiting[ref], ref, answer

    def send_what_waits(self) -> None:
        """Send priorities that had no draw to go with; wait where a shard has too much to do."""
        for member in self:
            member.flush()
            excess = len(member.sent) - MAX_SENT
            if excess > 0:
                ready, member.sent = self._ray.wait(
                    member.sent, num_returns=excess, timeout=self.timeout
                )
                if len(ready) < excess:
                    member.lose(f"{len(member.sent)} messages with priorities are not answered")

    def _follow_map(self) -> None:
        """Ask the map who is there, and take in what it has answered, without waiting for it."""
        ray, now = self._ray, time.monotonic()
        if self._asked is None:
            if now - self._asked_at >= PROBE_S:
                self._asked_at = now
                try:
                    self._asked = self._map.keepers.remote()
                except ray.exceptions.RayError:
                    self._map = self._find_map()
            return
        if ray.wait([self._asked], timeout=0)[0]:
            asked, self._asked = self._asked, None
            try:
                self._take(ray.get(asked))
            except ray.exceptions.RayError:
                return  # it is being started again, and is asked again

    def _take(self, keepers: dict[str, Any]) -> None:
        for node, keeper in keepers.items():
            member = self._members.get(node)
            if member is None or member.keeper._actor_id != keeper._actor_id:
                if member is not None:
                    member.handle.detach()
                self._members[node] = Member(node, keeper, self._where)

    def leave(self) -> None:
        """Leave the directories that are open here."""
        self.send_what_waits()
        for member in self:
            member.handle.detach()


def told(message: Any) -> Any:
    """What a keeper has told, or the error to raise."""
    done, result = unpacked(message)
    return result if done else opened(result)
