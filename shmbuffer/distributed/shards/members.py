"""A client's view of all shards. The client polls the map for changes without waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from shmbuffer.distributed.keeper import open_answer
from shmbuffer.distributed.shards.member import FRESH_S, PROBE_S, Member, Sent

MAX_SENT = 64
"""Maximum number of unanswered messages to one shard that contain only priorities."""

START_S = 180.0
"""Maximum time in seconds for the actors to start. On a busy node this takes minutes."""


class Members:
    """A client's view of all shards. See `Member` for the other arguments."""

    def __init__(
        self,
        ray: Any,  # the module ``ray``
        find_map: Callable[[], Any],  # returns the map, or raises ValueError if there is no map
        where: str,
        home: str,  # name of this process's node
        timeout: float,
        patience: int,
    ) -> None:
        self._ray, self._find_map, self._where = ray, find_map, where
        self._home, self.timeout, self._patience = home, timeout, patience
        self._members: dict[str, Member] = {}
        self._absent: list[str] = []
        self._asked: Any = None
        self._asked_at = 0.0
        self._map = find_map()
        self._take(self.ask_map("keepers"), lives=True)

    def ask_map(self, name: str, *args: Any) -> Any:
        """Calls a method of the map and returns the result. Waits for a restart of the map.

        Raises RuntimeError if the map does not answer within `START_S` seconds.
        """
        ray, end = self._ray, time.monotonic() + START_S
        while True:
            try:
                return ray.get(getattr(self._map, name).remote(*args), timeout=self.timeout)
            except ray.exceptions.RayTaskError:
                raise
            except ray.exceptions.RayError as error:
                if time.monotonic() >= end:
                    raise RuntimeError(
                        f"{self._where}: the shard map does not answer ({type(error).__name__}), "
                        f"and Ray has not restarted the map within {START_S:g} s"
                    ) from error
            time.sleep(FRESH_S)
            self._map = self._find_map()

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def living(self) -> list[Member]:
        """Returns the shards that answered their last request."""
        return [member for member in self if member.lives]

    def missing(self, without: Collection[str] = ()) -> str:
        """Returns a phrase for messages that names the shards that do not answer.

        Args:
            without: nodes that are left out of the phrase.

        Returns:
            The phrase, or "" if all other shards answer.
        """
        nodes = [node for node in self.missing_nodes() if node not in without]
        return f"no answer from the shards of {', '.join(nodes)}" if nodes else ""

    def missing_nodes(self) -> list[str]:
        """Returns the names of the nodes whose shards do not answer or do not exist."""
        return [*(member.node for member in self if not member.lives), *self._absent]

    def require_all(self, done: str, without: Collection[str] = (), hint: str = "") -> None:
        """Raises RuntimeError unless all shards answer.

        Args:
            done: participle for the message, such as "saved".
            without: nodes whose shards are not needed.
            hint: end of the message.
        """
        if missing := self.missing(without):
            raise RuntimeError(
                f"{self._where}: {missing}; the shards can only be {done} together. Nothing was "
                f"done{hint}"
            )

    def at(self, node: str) -> Member | None:
        """Returns the shard on a node, or None if there is none."""
        return self._members.get(node)

    def by_identity(self) -> dict[int, Member]:
        """Returns the shards that contain data, keyed by identity."""
        return {one.identity: one for one in self if one.identity is not None}

    def refresh(self, *, all_of_them: bool = False) -> None:
        """Updates the totals of each shard that are older than `FRESH_S` seconds.

        Waits at most one round trip. Shards that do not answer are only probed.

        Args:
            all_of_them: if True, updates the totals of all shards, and first sends the waiting
                priorities.
        """
        self._follow_map()
        if all_of_them:
            self.send_what_waits()
        now, asked = time.monotonic(), []
        for member in self:
            if member.lives and not all_of_them and now - member.seen <= FRESH_S:
                continue
            if member.look():
                continue
            if member.lives:
                asked.append((member, member.ask("news")))
            else:
                member.probe(self._ray)
        for member, _, message in self.answers(asked):
            member.take_news(message)

    def answers(self, asked: Iterable[tuple[Member, Sent]]) -> Iterator[tuple[Member, Sent, Any]]:
        """Waits for answers, and yields those that arrive in time. The other shards are lost.

        Messages of an earlier life of a shard are ignored.
        """
        ray = self._ray
        waiting = {sent.ref: (member, sent) for member, sent in asked if sent.life == member.life}
        if not waiting:
            return
        ready, late = ray.wait(list(waiting), num_returns=len(waiting), timeout=self.timeout)
        for ref in late:
            self._lose(*waiting[ref], f"no answer within {self.timeout:g} s")
        for ref in ready:
            try:
                message = ray.get(ref)
            except ray.exceptions.RayError as error:
                self._lose(*waiting[ref], type(error).__name__)
                continue
            member, sent = waiting[ref]
            if sent.life == member.life:
                yield member, sent, message

    def collect(self, coming: Mapping[Sent, Member]) -> list[tuple[Member, Sent]]:
        """Waits for results of `Shard.step`, and stores each result in its message.

        Returns:
            The messages whose results have arrived, each with its shard.
        """
        asked = ((member, sent) for sent, member in coming.items() if sent.result is None)
        arrived = []
        for member, sent, message in self.answers(asked):
            sent.result = open_answer(message)
            arrived.append((member, sent))
        return arrived

    def _lose(self, member: Member, sent: Sent, why: str) -> None:
        """Marks a shard as lost, unless the failed message belongs to an earlier life."""
        if sent.life == member.life:
            member.lose(why)

    def send_what_waits(self) -> None:
        """Sends the waiting priority updates of all shards.

        If a shard has more than `MAX_SENT` unanswered messages, waits for answers to the excess.
        """
        for member in self:
            member.flush()
            excess = len(member.sent) - MAX_SENT
            if excess > 0:
                ready, member.sent = self._ray.wait(
                    member.sent, num_returns=excess, timeout=self.timeout
                )
                if len(ready) < excess:
                    member.lose(
                        f"{len(member.sent)} messages with priorities have not been answered"
                    )

    def send_map(self, name: str, *args: Any) -> Any:
        """Calls a method of the map, and returns Ray's reference to the result."""
        return getattr(self._map, name).remote(*args)

    def lose_map(self) -> None:
        """Finds the map again after it has died. Raises ValueError if the buffer has ended."""
        self._map = self._find_map()

    def _follow_map(self) -> None:
        """Updates the list of keepers from the map, without waiting.

        Sends a request every `PROBE_S` seconds, and reads the answer once it has arrived.
        """
        ray, now = self._ray, time.monotonic()
        if self._asked is None:
            if now - self._asked_at >= PROBE_S:
                self._asked_at = now
                self._asked = self._map.keepers.remote()
            return
        if ray.wait([self._asked], timeout=0)[0]:
            asked, self._asked = self._asked, None
            try:
                self._take(ray.get(asked))
            except ray.exceptions.RayError:
                self.lose_map()

    def _take(self, answer: tuple[dict[str, Any], list[str]], *, lives: bool = False) -> None:
        """Records the result of `ShardMap.keepers`.

        Args:
            answer: the result.
            lives: True if the keepers of new shards are known to answer.
        """
        keepers, absent = answer
        self._absent = [node for node in absent if node not in self._members]
        for node, keeper in keepers.items():
            member = self._members.get(node)
            if member is None:
                here = node == self._home
                member = Member(node, keeper, self._where, here, self.timeout, self._patience)
                member.lives = lives  # False: the keeper is being started
                self._members[node] = member
            elif member.keeper._actor_id != keeper._actor_id:
                member.move(keeper)

    def leave(self) -> None:
        """Sends the waiting priorities, and closes the shards that are open in this process."""
        self.send_what_waits()
        for member in self:
            member.handle.detach()
