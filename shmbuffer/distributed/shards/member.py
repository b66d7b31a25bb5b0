"""A client's view of one shard: through shared memory on its own node, otherwise through Ray.

A shard whose keeper has died or does not answer in time counts as empty until it answers again. A
new *life* of the shard begins when it is lost: answers to messages of an earlier life are
discarded.
"""

from __future__ import annotations

import logging
import time
from typing import Any, NamedTuple

from shmbuffer.distributed.keeper import open_answer, send_request
from shmbuffer.distributed.nearby import SAMPLE, WRITE
from shmbuffer.distributed.ray import RayClient
from shmbuffer.distributed.shards.shard_pieces import (
    NOTHING,
    Piece,
    apply_update,
    draw_pieces,
    news_of,
)
from shmbuffer.errors import BufferUnlinkedError
from shmbuffer.memory import Totals

FRESH_S = 0.1
"""Maximum age in seconds of a shard's totals when a batch is divided among the shards."""

PROBE_S = 0.5
"""Minimum time in seconds between two requests to the map, or to a shard that does not answer."""

_log = logging.getLogger(__name__)


class Sent:
    """A message that was sent to a keeper, and the result once it has arrived."""

    __slots__ = ("life", "ref", "result")

    def __init__(self, ref: Any, life: int) -> None:
        self.ref = ref  # Ray's reference to the answer
        self.life = life  # life of the shard when the message was sent
        self.result: Any = None  # result of `Shard.step`; None until it has arrived


class PendingPiece(NamedTuple):
    """A piece that has been requested. One message can request pieces of several batches."""

    sent: Sent
    at: int  # position of the piece in the message's result


class Update:
    """A priority update for items in one shard, and its result; see `apply_update`."""

    __slots__ = ("answer", "found", "given")

    def __init__(self, shard: int, index: Any, priority: Any, generation: Any) -> None:
        self.given = shard, index, priority, generation
        self.found: tuple[int, int, int] | None = None  # numbers applied, stale and lost
        self.answer: tuple[Sent, int] | None = None  # message, and position of the result in it

    def lose(self) -> None:
        """Counts all priorities in this update as lost."""
        self.found = 0, 0, len(self.given[2])

    def result(self) -> tuple[int, int, int]:
        """Returns the numbers of priorities that were applied, stale and lost.

        If no answer has arrived, all priorities count as lost.
        """
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
        where: description of the buffer, for messages.
        is_here: True if the shard is on this process's node.
        timeout: maximum time in seconds to wait for an answer.
        patience: maximum number of priority updates that wait for the next draw. A further update
            sends them immediately.
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
        self.sent: list[Any] = []  # Ray's references to answers to messages with priorities alone
        self._waiting: list[Update] = []
        self._patience = patience
        self._take(keeper)

    def _take(self, keeper: Any) -> None:
        """Uses the given keeper from now on."""
        self.keeper = keeper
        self.handle = RayClient(
            keeper, has_gpu=False, remote_only=self._away, timeout=self._timeout
        )

    def move(self, keeper: Any) -> None:
        """Switches to a new keeper after the node has restarted.

        The shard counts as empty until the new keeper answers.
        """
        self.lose("its node died and has returned")
        self._probed = -PROBE_S
        self.handle.detach()
        self._take(keeper)

    def near(self, group: str) -> Any:
        """Returns the shard's buffer, opened in this process, or None if the keeper must be asked.

        Args:
            group: kind of call for which the buffer is needed; see `GROUPS`.
        """
        if not self.lives and self.handle._near is None:
            return None
        try:
            reached = self.handle._reach(group)
        except self.handle.owner_is_gone as error:
            self.lose(type(error).__name__)
            return None
        return None if reached is None else reached.buffer

    def can_write(self) -> bool:
        """True if the shard can be written to, in memory or through its keeper."""
        return self.lives or self.near(WRITE) is not None

    def is_empty(self) -> None:
        """Records that the shard has reported that it has no items."""
        if self.lives:
            self.learn(NOTHING._replace(max_priority=self.totals.max_priority), None)

    def learn(self, totals: Totals, identity: int | None) -> None:
        """Records the totals that the shard has reported, and its identity unless it is None."""
        if not self.lives:
            _log.info("%s: the shard of node %s answers again", self._where, self.node)
        self.lives, self.totals, self.seen = True, totals, time.monotonic()
        if identity is not None:
            self.identity = identity

    def lose(self, why: str) -> None:
        """Counts the shard as empty until it answers again, and its waiting priorities as lost.

        Args:
            why: the reason, for the log.
        """
        if self.lives:
            _log.warning(
                "%s: the shard of node %s does not answer (%s); its %d items are not sampled until "
                "it answers again",
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
        """Detaches from the shard's directory, which has been removed.

        The keeper creates a new directory. ``error`` is the exception that reported the removal.
        """
        self.handle.detach()
        self.lose(type(error).__name__)

    def whole(self, name: str, *args: Any) -> Any:
        """Calls a method of the shard's buffer, such as a save, and waits without a timeout.

        Raises RuntimeError if the keeper dies.
        """
        try:
            return getattr(self.handle, name)(*args)
        except self.handle.owner_is_gone as error:
            self.lose(type(error).__name__)
            raise RuntimeError(
                f"{self._where}: {name}() failed on node {self.node}, because its shard does not "
                f"respond ({type(error).__name__}); call it again when the shard has returned"
            ) from error

    def look(self) -> bool:
        """Reads the shard's totals through shared memory.

        Returns False if this process cannot open the shard, or if the shard has no schema yet.
        """
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
        """Sends the keeper a request to call a method of `Shard`, without waiting."""
        return Sent(send_request(self.keeper, name, *args), self.life)

    def take_news(self, message: Any) -> None:
        """Records the keeper's answer to a call of `Shard.news`."""
        try:
            identity, totals, self.capacity = open_answer(message)
        except Exception as error:  # the keeper answers, but cannot open its directory
            self.lose(f"{type(error).__name__}: {error}")
        else:
            self.learn(totals, identity)
            self.identity = identity  # None if the directory is new

    def probe(self, ray: Any) -> None:
        """Checks, without waiting, whether a lost shard answers again.

        Sends a request if none is pending, and otherwise reads the reply if it has arrived.
        """
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

    def draw(self, orders: list[tuple[Any, ...]]) -> list[Piece | PendingPiece | None]:
        """Draws pieces of batches in memory, or requests them from the keeper.

        Args:
            orders: for each piece, the arguments of `draw_piece` after the node.

        Returns:
            For each order the piece, None if the shard is empty, or a `PendingPiece` if the piece
            was requested.
        """
        buffer = self.near(SAMPLE)
        if buffer is None:
            sent = self._step(orders)
        else:
            try:
                return [*draw_pieces(buffer, self.node, orders)]
            except BufferUnlinkedError as error:
                self.leave(error)
                sent = Sent(None, -1)  # no answer will arrive
        return [PendingPiece(sent, at) for at in range(len(orders))]

    def update(self, update: Update) -> None:
        """Applies a priority update in memory, or keeps it for the next message to the keeper."""
        buffer = self.near(SAMPLE)
        if buffer is not None:
            try:
                update.found = apply_update(buffer, self.node, *update.given)
            except BufferUnlinkedError as error:
                self.leave(error)
                update.lose()
            return
        if len(self._waiting) >= self._patience:
            self.flush()
        self._waiting.append(update)

    def flush(self) -> None:
        """Sends the waiting priority updates to the keeper, without waiting for the answer."""
        if self._waiting:
            self.sent.append(self._step([]).ref)

    def _step(self, orders: list[tuple[Any, ...]]) -> Sent:
        """Sends the keeper a call of `Shard.step` with the waiting updates and the given orders."""
        waiting, self._waiting = self._waiting, []
        sent = self.ask("step", [update.given for update in waiting], orders)
        for at, update in enumerate(waiting):
            update.answer = sent, at
        return sent
