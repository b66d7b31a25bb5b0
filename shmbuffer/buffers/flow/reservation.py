"""A reservation of space for the items of a rollout."""

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
    """A reservation of space for future items, created by `ReplayBuffer.reserve` or `resume`.

    The rate limiter counts the reserved items as written, and the space is not available to other
    writers, but no slots are assigned before `commit`. If the ``with`` block ends without a commit,
    the reservation is aborted. If the handle is closed or its process ends, the reservation also
    ends, and another process can `resume` the rollout from the appended pieces.

        with rb.reserve(32, version=policy.version) as reservation:
            reservation.commit(collect(32))

    Attributes:
        items: number of items that can be committed.
        version: version of the policy that generates the items, or None.
        refused: number of items that the last `commit` rejected as too old.
    """

    def __init__(
        self,
        rb: Any,
        engine: Engine,
        items: int,
        granted: NDArray[np.uint64],
        version: int | None,
        nbytes: int = 0,  # number of reserved bytes for records, or 0 if none were reserved
        partial: PartialFile | None = None,
    ) -> None:
        self._engine = engine
        self._rb = rb
        self._nbytes = nbytes
        self._room = _Room(engine, granted)
        self._over = ""  # how the reservation ended, for messages; empty while it is in use
        self._partial = None if partial is None else self._kept(partial)
        self.items = items
        self.version = version
        self.refused = 0

    @property
    def id(self) -> int | None:
        """The unique ID of the reservation, or None before the first write to the buffer."""
        name = self._room.name
        return None if name is None else name // RESERVATIONS

    @property
    def ended(self) -> bool:
        """True if the reservation was committed, aborted or released through this object."""
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
        """Writes items into the reserved space atomically, and ends the reservation.

        Appended pieces are written before ``data``. Unused space is released. If an exception is
        raised before the write, the reservation stays valid.

        Args:
            data: the items, as for `extend`. If None, writes only the appended pieces.
            version: version of the policy, one for each item or one for all. If None, uses the
                version of the reservation. Items that exceed the limiter's ``max_staleness`` when
                they are written are rejected, and counted in ``refused`` and ``rb.stats()``. Items
                of the same version are either all accepted or all rejected.
            priority: priority of each item, which `update_priority` sets after the write.
            whole: if True, ``data`` already contains the appended pieces, which are then discarded.
            timeout: as for `extend`. The call only waits if another process is still writing one of
                the slots.
            **given: further arguments of `extend`.

        Returns:
            The indices of the items; see `extend`. If nothing was written, int64 ``[0]``.

        Raises:
            ReservationLostError: the reservation was committed or aborted, its lease has expired,
                its handle was inherited through fork, or its holder was considered dead.
            ValueError: the data exceed the reserved items or bytes, or the number of versions
                differs from the number of items. Nothing was changed.
            SchemaMismatchError, RingOverrunError: as for `extend`. Nothing was changed.
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
        """Stores items of an unfinished rollout, so that another process can continue the rollout.

        The items are stored in a separate file that survives the death of the process. They can be
        sampled only after `commit`.

        Args:
            data: a batch of tensors, arrays, text, numbers, and dicts and lists of these.

        Raises:
            ReservationLostError: as for `commit`.
            ShmBufferError: the buffer has no directory, or was never written to.
            TypeError: a value could only be stored by pickling it.
            SpaceError: there is no space for the file. Nothing was appended.
        """
        self._require_held("append")
        batch = TensorEncoder().encode(data, single=True)
        partial = self._partial or self._make_partial()
        partial.append(batch.body(0), length_of(data))

    @property
    def pieces(self) -> list[Any]:
        """Copies of the appended batches, in the order in which they were appended.

        Raises:
            ReservationLostError: as for `commit`.
        """
        if self._partial is None:
            return []
        self._require_held("pieces")
        decoder = TensorDecoder(where=self._engine.where)
        return [decoder.items(join([body]))[0] for _, body in self._partial.read()]

    def abort(self) -> None:
        """Releases the space and deletes the appended pieces.

        Has no effect if the reservation has already ended.
        """
        if self._over:
            return
        if not self._room.is_ours():
            self._let_go()
            return
        self._over = "was aborted"
        if self._partial is not None:
            # The file is removed before the space is released. If this process dies in between, no
            # other process resumes the aborted rollout.
            self._partial.remove()
            self._partial.close()
        self._room.give_back()

    def _committed(self, data: Any, ages: Any, timeout: float | None, given: Any) -> Any:
        """Writes the items. If the core rejects some as too old, writes the others.

        Args:
            data: the items with the appended pieces.
            ages: policy version of each item, one version for all, or None.
            timeout: maximum wait in seconds for other writers, or None.
            given: further arguments of `extend`.

        Returns:
            The index of the written items.
        """
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
        # Before the first write to the buffer nothing is reserved, so this is an ordinary write.
        if name is None or ring is None:
            return _nothing() if data is None else self._rb.extend(data, **given)
        index = None
        if data is not None:
            with ring.reservations.hold(name, versions, young):
                index = self._rb.extend(data, **given)
        # After a write, this has no effect. If a transform kept all items back, the space is still
        # reserved.
        self._room.give_back()
        return _nothing() if index is None else index

    def _versions(self, data: Any, ages: Any) -> NDArray[np.int64] | None:
        """Returns the version of each item, int64 ``[n]``, or one version for all, ``[1]``.

        Returns None without versions. Raises ValueError if the number of versions is wrong, or if a
        version is negative.
        """
        if ages is None:
            return None
        count, versions = length_of(data), np.asarray(ages, np.int64).reshape(-1)
        if np.ndim(ages) and len(versions) != count:
            raise ValueError(
                f"{self._engine.where}: got {len(versions)} versions for {count} items; pass one "
                "for each item, or one for all items"
            )
        if versions.min(initial=0) < 0:
            raise ValueError(
                f"{self._engine.where}: a version must be an integer of at least 0, got {ages}"
            )
        return versions

    def _young_now(self, versions: NDArray[np.int64] | None) -> NDArray[np.bool_] | None:
        """Returns True for each item that is not too old, bool ``[n]``, before the first write.

        Returns None after the first write, because the core then compares the versions, or if there
        is no limit.
        """
        limiter = self._engine.limiter
        most = None if limiter is None else limiter.max_staleness
        if versions is None or most is None or self._engine.ring() is not None:
            return None
        return versions >= consumer_version.read(self._engine.seat) - most

    def _with_pieces(self, data: Any, whole: bool) -> Any:
        if whole and data is None:
            raise ValueError(
                "commit(whole=True) needs data with all items of the rollout, got None; pass the "
                "items, or omit whole=True to commit the appended pieces"
            )
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
            what = "has no directory" if directory is None else "was never written to"
            raise ShmBufferError(
                f"{self._engine.where}: append() stores items in the buffer's directory, but this "
                f"buffer {what}; keep the items in your process until commit()"
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
        """Registers the file of a rollout, which the handle closes when the handle is closed.

        Other processes can resume the rollout after that.
        """
        self._engine.seat.partial_files.add(partial)
        return partial

    def _see_off(self) -> None:
        """Removes the file of a committed rollout, and then the record of the commit."""
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
            f"{where}: {what}: {problem}. Nothing was changed. Call reserve() again"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def __del__(self) -> None:
        if not getattr(self, "_over", "made half"):
            with suppress(Exception):  # at interpreter exit, modules and handle may be gone
                self._let_go()

    def _let_go(self) -> None:
        """Releases the space, and leaves the appended pieces for another process to resume.

        The death of the process has the same effect.
        """
        self._over = "was released"
        self._room.give_back()
        if self._partial is not None:
            self._partial.close()

    def __repr__(self) -> str:
        state = self._over or "held"
        return f"Reservation(id={self.id}, items={self.items}, {state})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Reservation cannot be pickled, because it belongs to one handle; call reserve() in "
            "the process that calls commit()"
        )


class _Room:
    """The reserved space, which has a number and can be released.

    The finalizer of this object runs after the finalizer of the `Reservation`. A Ctrl-C interrupts
    at most one of the two, so the space is always released.
    """

    def __init__(self, engine: Engine, granted: NDArray[np.uint64]) -> None:
        self._engine = engine
        self.granted = granted  # array with the number of the reservation; 0 until it is granted
        self._incarnation = engine.seat.incarnation
        self._is_over = False

    @property
    def name(self) -> int | None:
        """The number of the reservation, or None if no space was reserved yet."""
        return int(self.granted[0]) or None

    def is_ours(self) -> bool:
        """True if the reservation belongs to this handle, in the process that reserved it."""
        seat = self._engine.seat
        return not seat.closed and seat.is_ours() and seat.incarnation == self._incarnation

    def give_back(self) -> None:
        """Releases the space for other writers.

        Has no effect if the space was used or belongs to another process.
        """
        name = self.name
        if name is not None and self.is_ours() and (ring := self._engine.ring()):
            ring.reservations.give_back(name)
        self._is_over = True

    def __del__(self) -> None:
        if not getattr(self, "_is_over", True):
            with suppress(Exception):  # at interpreter exit, modules and handle may be gone
                self.give_back()


def _nothing() -> torch.Tensor:
    """Returns the index of zero items."""
    return cpu.zeros(0, dtype=torch.int64)


def _rows(data: Any, which: NDArray[np.bool_]) -> Any:
    """Returns the items of a batch for which ``which`` is True."""
    if isinstance(data, list):
        return [item for item, kept in zip(data, which, strict=True) if kept]
    if isinstance(data, Mapping) and not is_collection(data):
        return {key: _rows(value, which) for key, value in data.items()}
    if isinstance(data, tuple):
        return tuple(_rows(value, which) for value in data)
    return data[which] if isinstance(data, np.ndarray) else data[torch.from_numpy(which)]


def _joined(batches: list[Any]) -> Any:
    """Concatenates batches of items along the first dimension."""
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
