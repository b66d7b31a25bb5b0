"""One shard, as a client sees it: in memory on its own node, else its keeper by Ray.

A shard whose keeper has died, or does not answer in time, counts as empty until it answers again.
From then on it leads another life: answers to messages of the one before are not waited for, and
dropped.
"""

from __future__ import annotations

import logging
import time
from typing import Any, NamedTuple

from shmbuffer.distributed.host import opened
from shmbuffer.distributed.nearby import SAMPLE, WRITE
from shmbuffer.distributed.ray import RayClient
from shmbuffer.distributed.shards.keeper import updated
from shmbuffer.distributed.shards.message import unpacked
from shmbuffer.distributed.shards.pieces import Piece, identity_in, pieces_of, ring_in
from shmbuffer.errors import BufferUnlinkedError, EmptyBufferError
from shmbuffer.memory import Totals

FRESH_S = 0.1
"""How old the picture of a shard may be when a batch is drawn by it."""

PROBE_S = 0.5
"""How often a shard that does not answer, and the map, are asked again."""

_NOTHING = Totals(0.0, 0.0, None, 0)

_log = logging.getLogger(__name__)


class Sent(NamedTuple):
    """A message that was sent to a keeper."""

    ref: Any
    """Ray's reference to the answer."""
    life: int
    """In which life of the shard."""


class Reply:
    """What a keeper draws for several batches, in one message."""

    __slots__ = ("pieces", "sent")

    def __init__(self, sent: Sent) -> None:
        self.sent = sent
        self.pieces: list[Piece | None] | None = None  # None until it has come


class Coming(NamedTuple):
    """A piece that is on its way."""

    reply: Reply
    at: int
    """Which piece of the reply it is."""


class Update:
    """Priorities of items of one shard, and what became of them."""

    __slots__ = ("answer", "found", "given")

    def __init__(self, shard: int, index: Any, priority: Any, generation: Any) -> None:
        self.given = shard, index, priority, generation
        self.found: tuple[int, int, int] | None = None  # applied, stale, lost
        self.answer: tuple[Sent, int] | None = None  # the message that will say it, and where

    def lose(self) -> None:
        """The shard does not answer."""
        self.found = 0, 0, len(self.given[2])


class Member:
    """One shard.

    Args:
        node: name of its node.
        keeper: the actor there.
        where: the buffer's name, for messages.
        is_here: whether it is on this process's node.
        timeout: seconds that it may take to answer.
        patience: updates that may wait for a draw to go with.
    """

    def __init__(
        self, node: str, keeper: Any, where: str, is_here: bool, timeout: float, patience: int
    ) -> None:
        self.node, self._where = node, where
        self._is_here, self._timeout = is_here, timeout
        self.identity: int | None = None
        self.totals = _NOTHING
        self.capacity = 0
        self.seen = -FRESH_S
        self.lives = True
        self.life = 0
        self._why = ""
        self._probe: Any = None
        self._probed = -PROBE_S
        self.sent: list[Any] = []  # messages with priorities alone, not known to have arrived
        self._waiting: list[Update] = []
        self._patience = patience
        self._take(keeper)

    def _take(self, keeper: Any) -> None:
        self.keeper = keeper
        away = "" if self._is_here else f"its owner runs on the node {self.node}"
        self.handle = RayClient(keeper, has_gpu=False, remote_only=away)
        self.handle.timeout = self._timeout
        self.handle.owner_is_gone = (self.handle._ray.exceptions.RayError,)

    def move(self, keeper: Any) -> None:
        """Another keeper has the place of one whose node has died. It has to answer first."""
        self.lose("its node died and is back")
        self._probed = -PROBE_S
        self.handle.detach()
        self._take(keeper)

    def near(self, group: str) -> Any:
        """The shard's buffer in this process; None where it is not to be had."""
        if not self._is_here or not (self.lives or self.handle._near is not None):
            return None
        try:
            reached = self.handle._reach(group)
        except self.handle.owner_is_gone as error:
            self.lose(type(error).__name__)
            return None
        return None if reached is None else reached.buffer

    def can_write(self) -> bool:
        """Whether it is asked to write: it is here, or its keeper answers."""
        return self.lives or self.near(WRITE) is not None

    def is_empty(self) -> None:
        """It has no items any more, as far as it answers."""
        if self.lives:
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
        elif why != self._why:
            _log.warning("%s: the shard of node %s: %s", self._where, self.node, why)
        self.lives, self.totals, self._probe = False, _NOTHING, None
        self.life += 1
        self._why = why
        self._probed = time.monotonic()
        self.sent.clear()
        for update in self._waiting:
            update.lose()
        self._waiting.clear()

    def leave(self, error: Exception) -> None:
        """Its directory was removed: its keeper will make another one."""
        self.handle.detach()
        self.lose(type(error).__name__)

    def whole(self, name: str, *args: Any) -> Any:
        """Have the keeper do what concerns the shard as a whole; waits as long as it lives.

        Raises:
            RuntimeError: it died.
        """
        try:
            return self.handle._call(name, *args)
        except self.handle.owner_is_gone as error:
            self.lose(type(error).__name__)
            raise RuntimeError(
                f"{self._where}: {name}() was not done on node {self.node}, whose shard does not "
                f"answer ({type(error).__name__}); repeat it when the shard is back"
            ) from error

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

    def ask_news(self) -> Sent:
        """Have the keeper say what it weighs."""
        return Sent(self.keeper.news.remote(), self.life)

    def take_news(self, message: Any) -> None:
        """Take in what the keeper says."""
        try:
            identity, totals, self.capacity = told(message)
        except Exception as error:  # it is there, and cannot open its directory
            self.lose(f"{type(error).__name__}: {error}")
        else:
            self.learn(totals, identity)
            self.identity = identity  # None: its directory is a new one

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
                message = ray.get(answer)
            except ray.exceptions.RayError:
                return  # it is asked again
            self.take_news(message)

    def draw(self, orders: list[tuple[Any, ...]]) -> list[Piece | Coming | None]:
        """What each of ``orders`` draws, see `pieces.pieces_of`: a `Piece` where that is done here.

        None: the shard is empty.
        """
        buffer = self.near(SAMPLE)
        if buffer is None:
            reply = Reply(self._step(orders))
        else:
            try:
                return [*pieces_of(buffer, self.node, orders)]
            except BufferUnlinkedError as error:
                self.leave(error)
                reply = Reply(Sent(None, -1))  # nobody will answer
        return [Coming(reply, at) for at in range(len(orders))]

    def update(self, update: Update) -> None:
        """Set priorities: now, where it is near; else with the next message to the keeper."""
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
        """Send what waits for the next message."""
        if self._waiting:
            self.sent.append(self._step([]).ref)

    def _step(self, orders: list[tuple[Any, ...]]) -> Sent:
        """A message to the keeper, with the priorities that wait for one."""
        waiting, self._waiting = self._waiting, []
        given = [update.given for update in waiting]
        answer = Sent(self.keeper.step.remote(given, orders), self.life)
        for at, update in enumerate(waiting):
            update.answer = answer, at
        return answer


def told(message: Any) -> Any:
    """What a keeper has told, or the error to raise."""
    done, result = unpacked(message)
    return result if done else opened(result)
