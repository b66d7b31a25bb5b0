"""A client's view of a shard, in memory on its own node, otherwise through Ray and the keeper.

A shard whose keeper has died, or does not answer in time, counts as empty until it answers again.
Then a new life of the shard begins, and answers to messages of the previous life are discarded.
"""

from __future__ import annotations

import logging
import time
from typing import Any, NamedTuple

from shmbuffer.distributed.keeper import asked, opened
from shmbuffer.distributed.nearby import SAMPLE, WRITE
from shmbuffer.distributed.ray import RayClient
from shmbuffer.distributed.shards.shard_pieces import NOTHING, Piece, news_of, pieces_of, updated
from shmbuffer.errors import BufferUnlinkedError
from shmbuffer.memory import Totals

FRESH_S = 0.1
"""Maximum age in seconds of a shard's totals when a batch is divided among the shards."""

PROBE_S = 0.5
"""Seconds between two requests to the map, or to a shard that does not answer."""

_log = logging.getLogger(__name__)


class Sent:
    """A message to a keeper."""

    __slots__ = ("life", "ref", "result")

    def __init__(self, ref: Any, life: int) -> None:
        self.ref = ref  # Ray's reference to the answer
        self.life = life  # life of the shard when the message was sent
        self.result: Any = None  # result of `Shard.step`, once it has arrived


class Coming(NamedTuple):
    """A piece that has not arrived yet. One message can request pieces of several batches."""

    sent: Sent
    at: int  # position of the piece in the result


class Update:
    """A priority update for items of one shard, and its result."""

    __slots__ = ("answer", "found", "given")

    def __init__(self, shard: int, index: Any, priority: Any, generation: Any) -> None:
        self.given = shard, index, priority, generation
        self.found: tuple[int, int, int] | None = None  # numbers applied, stale and lost
        self.answer: tuple[Sent, int] | None = None  # the message, the position of the result in it

    def lose(self) -> None:
        """Counts all priorities of this update as lost."""
        self.found = 0, 0, len(self.given[2])

    def result(self) -> tuple[int, int, int]:
        """Returns how many were applied, stale and lost. Without an answer, all are lost."""
        if self.found is None and self.answer is not None and self.answer[0].result is not None:
            self.found = self.answer[0].result[0][self.answer[1]]
        if self.found is None:
            self.lose()
        assert self.found is not None
        return self.found


class Member:
    """A client's view of one shard.

    Args:
        node: name of the shard's node.
        keeper: the actor that owns the shard.
        where: the buffer's name, for messages.
        is_here: True if the shard is on this process's node.
        timeout: seconds to wait for an answer.
        patience: number of updates that may wait to be sent together with the next draw.
    """

    def __init__(
        self, node: str, keeper: Any, where: str, is_here: bool, timeout: float, patience: int
    ) -> None:
        self.node, self._where, self._timeout = node, where, timeout
        self._away = "" if is_here else f"its owner runs on the node {node}"
        self.identity: int | None = None
        self.totals = NOTHING
        self.capacity = 0
        self.seen = -FRESH_S
        self.lives = True
        self.life = 0
        self._why = ""
        self._probe: Any = None
        self._probed = -PROBE_S
        self.sent: list[Any] = []  # unanswered messages that contain only priorities
        self._waiting: list[Update] = []
        self._patience = patience
        self._take(keeper)

    def _take(self, keeper: Any) -> None:
        self.keeper = keeper
        self.handle = RayClient(
            keeper, has_gpu=False, remote_only=self._away, timeout=self._timeout
        )

    def move(self, keeper: Any) -> None:
        """Switches to a new keeper after its node has restarted. It must answer first."""
        self.lose("its node died and has returned")
        self._probed = -PROBE_S
        self.handle.detach()
        self._take(keeper)

    def near(self, group: str) -> Any:
        """Returns the shard's buffer as opened in this process, or None if it is not reachable."""
        if not self.lives and self.handle._near is None:
            return None
        try:
            reached = self.handle._reach(group)
        except self.handle.owner_is_gone as error:
            self.lose(type(error).__name__)
            return None
        return None if reached is None else reached.buffer

    def can_write(self) -> bool:
        """True if the shard can be written to, in memory or because its keeper answers."""
        return self.lives or self.near(WRITE) is not None

    def is_empty(self) -> None:
        """Records that the shard has become empty."""
        if self.lives:
            self.learn(NOTHING._replace(max_priority=self.totals.max_priority), None)

    def learn(self, totals: Totals, identity: int | None) -> None:
        """Records the state that the shard has reported."""
        if not self.lives:
            _log.info("%s: the shard of node %s answers again", self._where, self.node)
        self.lives, self.totals, self.seen = True, totals, time.monotonic()
        if identity is not None:
            self.identity = identity

    def lose(self, why: str) -> None:
        """Counts the shard as empty until it answers."""
        if self.lives:
            _log.warning(
                "%s: the shard of node %s does not answer (%s); its %d items are left out until "
                "it does",
                *(self._where, self.node, why, self.totals.length),
            )
        elif why != self._why:
            _log.warning("%s: the shard of node %s: %s", self._where, self.node, why)
        self.lives, self.totals, self._probe = False, NOTHING, None
        self.life += 1
        self._why = why
        self._probed = time.monotonic()
        self.sent.clear()
        for update in self._waiting:
            update.lose()
        self._waiting.clear()

    def leave(self, error: Exception) -> None:
        """Detaches from the shard's removed directory. The keeper will create another one."""
        self.handle.detach()
        self.lose(type(error).__name__)

    def whole(self, name: str, *args: Any) -> Any:
        """Calls a method for the whole shard without a timeout.

        Raises RuntimeError if the shard died.
        """
        try:
            return getattr(self.handle, name)(*args)
        except self.handle.owner_is_gone as error:
            self.lose(type(error).__name__)
            raise RuntimeError(
                f"{self._where}: {name}() was not done on node {self.node}, whose shard does not "
                f"respond ({type(error).__name__}); repeat it when the shard has returned"
            ) from error

    def look(self) -> bool:
        """Reads the shard's totals in memory. Returns False if the memory is not reachable."""
        buffer = self.near(SAMPLE)
        if buffer is None:
            return False
        identity, totals, capacity = news_of(buffer, self.node)
        if identity is None:
            return False
        self.capacity = capacity
        self.learn(totals, identity)
        return True

    def ask(self, name: str, *args: Any) -> Sent:
        """Sends the keeper a request to call a method of `Shard`."""
        return Sent(asked(self.keeper, name, *args), self.life)

    def take_news(self, message: Any) -> None:
        """Records the keeper's answer to a call of `Shard.news`."""
        try:
            identity, totals, self.capacity = opened(message)
        except Exception as error:  # the keeper answers, but cannot open its directory
            self.lose(f"{type(error).__name__}: {error}")
        else:
            self.learn(totals, identity)
            self.identity = identity  # None if the directory is new

    def probe(self, ray: Any) -> None:
        """Sends a request to a shard that does not answer, without waiting for the reply."""
        if self._probe is None:
            if time.monotonic() - self._probed >= PROBE_S:
                self._probed = time.monotonic()
                self._probe = self.ask("news").ref
            return
        if ray.wait([self._probe], timeout=0)[0]:
            answer, self._probe = self._probe, None
            try:
                message = ray.get(answer)
            except ray.exceptions.RayError:
                return  # the next call sends a new request
            self.take_news(message)

    def draw(self, orders: list[tuple[Any, ...]]) -> list[Piece | Coming | None]:
        """Draws a piece for each order of `pieces_of`, or None for each if the shard is empty."""
        buffer = self.near(SAMPLE)
        if buffer is None:
            sent = self._step(orders)
        else:
            try:
                return [*pieces_of(buffer, self.node, orders)]
            except BufferUnlinkedError as error:
                self.leave(error)
                sent = Sent(None, -1)  # no answer will arrive
        return [Coming(sent, at) for at in range(len(orders))]

    def update(self, update: Update) -> None:
        """Sets priorities, now if the shard is in memory, else with the next message."""
        buffer = self.near(SAMPLE)
        if buffer is not None:
            try:
                update.found = updated(buffer, self.node, *update.given)
            except BufferUnlinkedError as error:
                self.leave(error)
                update.lose()
            return
        if len(self._waiting) >= self._patience:
            self.flush()
        self._waiting.append(update)

    def flush(self) -> None:
        """Sends the waiting priority updates."""
        if self._waiting:
            self.sent.append(self._step([]).ref)

    def _step(self, orders: list[tuple[Any, ...]]) -> Sent:
        """Sends the keeper orders together with the waiting priority updates."""
        waiting, self._waiting = self._waiting, []
        sent = self.ask("step", [update.given for update in waiting], orders)
        for at, update in enumerate(waiting):
            update.answer = sent, at
        return sent
