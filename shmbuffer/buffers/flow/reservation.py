"""Room that is reserved before a rollout begins, until its items are committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn, Self

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict

from shmbuffer.errors import ReservationLostError, ShmBufferError
from shmbuffer.memory import Engine, consumer_version
from shmbuffer.memory.clients.partials import PartialFile
from shmbuffer.memory.flow.status import TooOld
from shmbuffer.memory.format.ledger import RESERVATIONS
from shmbuffer.memory.mapped.record_batch import join
from shmbuffer.memory.system.deadline import limit_waits
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensor_nodes import is_collection
from shmbuffer.tensors.records.tensor_decoder import TensorDecoder
from shmbuffer.tensors.records.tensor_encoder import TensorEncoder
from shmbuffer.writers.round_robin import length_of


class Reservation:
    """Room for future items, made by `ReplayBuffer.reserve` or `resume`.

    It holds room and the limiter's credit, but no slot: `commit` places the items. The end of a
    ``with`` block aborts it, unless it was committed. It ends with its handle or process, too; what
    was appended is then left for `resume`.

        with rb.reserve(32, version=policy.version) as room:
            room.commit(collect(32))

    Attributes:
        items: how many may be committed.
        version: of the policy that makes them, or None.
        refused: items of the last `commit` that were too old.
    """

    def __init__(
        self,
        rb: Any,
        engine: Engine,
        items: int,
        granted: NDArray[np.uint64],
        version: int | None,
        nbytes: int = 0,  # reserved in the byte ring; 0: unknown
        partial: PartialFile | None = None,
    ) -> None:
        self._engine = engine
        self._rb = rb
        self._nbytes = nbytes
        self._room = _Room(engine, granted)
        self._over = ""  # how it ended here
        self._partial = None if partial is None else self._kept(partial)
        self.items = items
        self.version = version
        self.refused = 0

    @property
    def id(self) -> int | None:
        """Its unique number; None before the first write to the buffer."""
        name = self._room.name
        return None if name is None else name // RESERVATIONS

    @property
    def ended(self) -> bool:
        """True if this object has committed or aborted it."""
        return bool(self._over)

    def commit(
        self,
        data: Any = None,
        *,
        version: int | Sequence[int] | NDArray[np.int64] | torch.Tensor | None = None,
        priority: Any = None,
        whole: bool = False,
        timeout: float | None = None,
        **given: Any,
    ) -> Any:
        """Writes items into the reserved room, whole or not at all; this ends the reservation.

        Appended pieces come first; unused room is given back. After an error before the write, the
        reservation continues.

        Args:
            data: the items, as for `extend`; None: the appended pieces are all.
            version: of the policy, one for each item or for all; None: that of the reservation.
                Items that would be more than the limiter's ``max_staleness`` versions behind
                learners at their turn are refused, and counted in ``refused`` and ``rb.stats()``.
                Of the items of one version, all are refused or none.
            priority: of each item, for `update_priority` after the write.
            whole: ``data`` contains the appended pieces, which are dropped.
            timeout: as for `extend`; the only wait is for a writer in the same slots.
            **given: more arguments of `extend`.

        Returns:
            The index, as of `extend`; int64 ``[0]`` if nothing was written.

        Raises:
            ReservationLostError: it was committed or aborted, its lease is over, its handle came
                through fork, or its holder was taken for dead.
            ValueError: more items or bytes than reserved, or another number of versions than items.
                Nothing was changed.
            SchemaMismatchError, RingOverrunError: as `extend`; nothing was changed.
        """
        self._require_held("commit")
        data = self._with_pieces(data, whole)
        self.refused = 0
        ages = self.version if version is None else version
        index = self._committed(data, ages, timeout, given)
        self._over = "was committed"
        self._see_off()
        if priority is not None and len(index):
            self._rb.update_priority(index, priority)
        return index

    def append(self, data: Any) -> None:
        """Keeps items of an unfinished rollout, so that another process can continue it.

        They are in a file of their own, which survives the process; samples see them after
        `commit`.

        Args:
            data: a batch of tensors, arrays, text, numbers, dicts and lists of them.

        Raises:
            ReservationLostError: as `commit`.
            ShmBufferError: the buffer has no directory, or no items yet.
            TypeError: a value could only be pickled.
            SpaceError: no room for the file; nothing was appended.
        """
        self._require_held("append")
        batch = TensorEncoder().encode(data, single=True)
        partial = self._partial or self._make_partial()
        partial.append(batch.body(0), length_of(data))

    @property
    def pieces(self) -> list[Any]:
        """Copies of the appended batches, in order; raises as `commit`."""
        if self._partial is None:
            return []
        self._require_held("pieces")
        decoder = TensorDecoder(where=self._engine.where)
        return [decoder.items(join([body]))[0] for _, body in self._partial.read()]

    def abort(self) -> None:
        """Gives the room back, and drops the appended pieces; does nothing once it has ended."""
        if self._over:
            return
        if not self._room.is_ours():
            self._let_go()
            return
        self._over = "was aborted"
        if self._partial is not None:
            self._partial.remove()  # first: if we die now, no process continues it
            self._partial.close()
        self._room.give_back()

    def _committed(self, data: Any, ages: Any, timeout: float | None, given: Any) -> Any:
        """Writes; again without the items that the core refuses."""
        versions, refused = self._versions(data, ages), 0
        young = self._young_now(versions)
        while True:
            if young is not None and versions is not None and not young.all():
                whole = not np.ndim(ages)
                refused += length_of(data) if whole else int(np.count_nonzero(~young))
                data = _rows(data, young) if young.any() else None
                versions = versions[young]
            young = None if versions is None else np.ones(len(versions), np.bool_)
            with suppress(TooOld), limit_waits(timeout):
                index = self._written(data, versions, young, given)
                if refused and (ring := self._engine.ring()) is not None:
                    ring.reservations.refuse(refused * ring.width)
                self.refused = refused
                return index

    def _written(
        self,
        data: Any,
        versions: NDArray[np.int64] | None,
        young: NDArray[np.bool_] | None,
        given: Any,
    ) -> Any:
        ring, name = self._engine.ring(), self._room.name
        if name is None and ring is not None:
            name = ring.reservations.reserve(self.items, name=self._room.granted)
        if name is None or ring is None:  # nothing was written yet: an ordinary write
            return _nothing() if data is None else self._rb.extend(data, **given)
        index = None
        if data is not None:
            with ring.reservations.hold(name, versions, young):
                index = self._rb.extend(data, **given)
        self._room.give_back()  # of nothing, or where transforms kept all back
        return _nothing() if index is None else index

    def _versions(self, data: Any, ages: Any) -> NDArray[np.int64] | None:
        """The version of each item, or the one of them all."""
        if ages is None:
            return None
        count, versions = length_of(data), np.asarray(ages, np.int64).reshape(-1)
        if np.ndim(ages) and len(versions) != count:
            raise ValueError(
                f"{self._engine.where}: got {len(versions)} versions for {count} items; pass one "
                "for each item, or one for all"
            )
        if versions.min(initial=0) < 0:
            raise ValueError(
                f"{self._engine.where}: a version must be an int of at least 0, got {ages}"
            )
        return versions

    def _young_now(self, versions: NDArray[np.int64] | None) -> NDArray[np.bool_] | None:
        """Which items are not too old, before the first write: from then on the core says it."""
        limiter = self._engine.limiter
        most = None if limiter is None else limiter.max_staleness
        if versions is None or most is None or self._engine.ring() is not None:
            return None
        return versions >= consumer_version.read(self._engine.seat) - most

    def _with_pieces(self, data: Any, whole: bool) -> Any:
        if whole and data is None:
            raise ValueError("commit(whole=True) needs all items of the reservation; pass them")
        before = [] if whole else self.pieces
        found = before if data is None else [*before, data]
        if not found:
            raise TypeError(
                "commit(): no items were passed or appended; pass the items, or call abort()"
            )
        return _joined(found)

    def _make_partial(self) -> PartialFile:
        directory, name = self._engine.seat.backing.directory, self._room.name
        ring = self._engine.ring()
        if directory is None or name is None or ring is None:
            what = "has no directory" if directory is None else "has no items yet"
            raise ShmBufferError(
                f"{self._engine.where}: append stores the pieces in the buffer's directory, but "
                f"this buffer {what}; keep the pieces in your process until commit"
            )
        assert self.id is not None
        partial = PartialFile.make(directory, self.id, self.items, self._nbytes, self.version)
        try:
            ring.reservations.note_partial(name)
        except BaseException:
            partial.close()
            raise
        self._partial = self._kept(partial)
        return partial

    def _kept(self, partial: PartialFile) -> PartialFile:
        """Leaves a partial rollout to others once the handle is closed."""
        self._engine.seat.partial_files.add(partial)
        return partial

    def _see_off(self) -> None:
        """Removes the file, then the note that it is committed."""
        if self._partial is None:
            return
        self._partial.remove()
        ring = self._engine.ring()
        assert ring is not None
        ring.reservations.is_done(self._partial.number, forget=True)
        self._partial.close()

    def _require_held(self, what: str) -> None:
        where = self._engine.where
        self._engine.seat.require_open()
        if self._over:
            problem = f"this reservation {self._over}"
        elif not self._room.is_ours():
            problem = "this reservation belongs to the parent process"
        else:
            return
        raise ReservationLostError(
            f"{where}: {what}: {problem}. Nothing was changed. Make a new reservation"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def __del__(self) -> None:
        if not getattr(self, "_over", "made half"):
            with suppress(Exception):  # the interpreter may be gone, or the handle
                self._let_go()

    def _let_go(self) -> None:
        """Free the room and leave the pieces to others, as if we had died."""
        self._over = "was released"
        self._room.give_back()
        if self._partial is not None:
            self._partial.close()

    def __repr__(self) -> str:
        state = self._over or "held"
        return f"Reservation(id={self.id}, items={self.items}, {state})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a reservation cannot be pickled, because it belongs to one handle; reserve in "
            "the process that commits"
        )


class _Room:
    """Names a reservation, and gives its room back.

    Its finalizer comes behind that of the reservation: Ctrl-C ends one of them at most.
    """

    def __init__(self, engine: Engine, granted: NDArray[np.uint64]) -> None:
        self._engine = engine
        self.granted = granted  # what names it, once it is
        self._incarnation = engine.seat.incarnation
        self._is_over = False

    @property
    def name(self) -> int | None:
        """The name of the reservation; None before the first write, when nothing is reserved."""
        return int(self.granted[0]) or None

    def is_ours(self) -> bool:
        """True if it is of this handle still, which has not gone through fork."""
        seat = self._engine.seat
        return not seat.closed and seat.is_ours() and seat.incarnation == self._incarnation

    def give_back(self) -> None:
        """Others may have it; if it was spent, or is not ours, nothing happens."""
        name = self.name
        if name is not None and self.is_ours() and (ring := self._engine.ring()):
            ring.reservations.give_back(name)
        self._is_over = True

    def __del__(self) -> None:
        if not getattr(self, "_is_over", True):
            with suppress(Exception):  # the interpreter may be gone, or the handle
                self.give_back()


def _nothing() -> torch.Tensor:
    """The index of no items."""
    return cpu.zeros(0, dtype=torch.int64)


def _rows(data: Any, which: NDArray[np.bool_]) -> Any:
    """Some items of a batch."""
    if isinstance(data, list):
        return [item for item, kept in zip(data, which, strict=True) if kept]
    if isinstance(data, Mapping) and not is_collection(data):
        return {key: _rows(value, which) for key, value in data.items()}
    if isinstance(data, tuple):
        return tuple(_rows(value, which) for value in data)
    return data[which] if isinstance(data, np.ndarray) else data[torch.from_numpy(which)]


def _joined(batches: list[Any]) -> Any:
    """Batches as one batch."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Mapping) and not is_collection(first):
        return {key: _joined([batch[key] for batch in batches]) for key in first}
    if isinstance(first, tuple):
        return tuple(map(_joined, map(list, zip(*batches, strict=True))))
    lazy = any(isinstance(batch, LazyStackedTensorDict) for batch in batches)
    if lazy or any(isinstance(batch, list) for batch in batches):
        return [item for batch in batches for item in batch]
    if isinstance(first, np.ndarray):
        return np.concatenate([np.asarray(batch) for batch in batches])
    return torch.cat([cpu.as_tensor(b) if isinstance(b, np.ndarray) else b for b in batches])
