"""Sampler that delivers each window of a trajectory once, and fills batches with random slices."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shmbuffer.items.keys import GENERATION
from shmbuffer.memory import Ring
from shmbuffer.memory.flow.consumer import Consumer
from shmbuffer.memory.flow.consumers import Start
from shmbuffer.memory.format import slots
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.format.leaf import Key
from shmbuffer.samplers.claiming import ClaimingSampler
from shmbuffer.samplers.sampler import lanes_of
from shmbuffer.samplers.slicing.cuts import Cuts
from shmbuffer.samplers.slicing.options import Side, SliceOptions
from shmbuffer.samplers.slicing.slices import SliceSampler
from shmbuffer.samplers.slicing.trajectories import Trajectories
from shmbuffer.samplers.slicing.window_source import WindowSource
from shmbuffer.samplers.slicing.windows import Used, Windows, as_bits, from_bits
from shmbuffer.samplers.taking import Taking
from shmbuffer.saves.checkpoints import Loaded
from shmbuffer.storages.indexing import ravel
from shmbuffer.storages.storage import ring_of
from shmbuffer.tensors.form import cpu

_BEGINS = ("is_init",)
_REMEMBERED = 64  # number of draws that are remembered until their items have been read
_UNKNOWN = None, cpu.zeros(0, dtype=torch.int64), 0  # stands for a draw that is not remembered


class StreamingSliceSampler(ClaimingSampler, SliceSampler):
    """Draws each window of ``slice_len`` steps once, when the window is complete.

    A trajectory is cut from its first step into consecutive windows without overlap. A batch
    contains the windows that have not been drawn, in the order of their completion. If there are
    too few windows, the batch is filled up with random slices like those of a `SliceSampler`. Steps
    at the end of a trajectory that do not fill a window are in no window.

    - Streams and collectors can write alternately to one buffer. Each stream of each collector is
      followed separately. A window never crosses the end of a trajectory, and never contains a step
      whose ``is_init`` is true except as its first step.
    - A write in progress blocks all windows that are completed by later items, in all streams,
      because the stream of its items is not known yet. A dead writer blocks them for 0.1 s.
    - A window is skipped if one of its items is overwritten before the window is drawn. The window
      counts as `lost` unless it was also completed since the last draw. If writers are faster than
      a draw, the sampler also skips windows that would be overwritten before they are read. If the
      first steps of a trajectory were overwritten before this process read them, the rest of the
      trajectory is cut into windows.
    - Each process has its own record of the windows that it has drawn. A save of the buffer and
      `state_dict` include this record. A copy in another process starts with the oldest window.

    Args:
        slice_len: number of steps in a window or slice.
        end_key: key of the flag on the last step of a trajectory; see `SliceSampler`.
        end_keys: several such keys.
        traj_key: key of the trajectory id.
        cache_values: see `SliceSampler`.
        truncated_key: key of the entry that is set to True on the last step of each window.
        init_key: key of the entry that is set to True on the first step of each window. If None,
            leaves the entry unchanged.
        strict_length: if True, random slices are drawn only from trajectories that are long enough.
        pad_output: applies to random slices; see `SliceSampler`.
        compile: has no effect.
        span: applies to random slices; see `SliceSampler`.
        use_gpu: has no effect.
        consumer: name of a consumer. All learners with this name share the windows under leases, as
            with a `ConsumingSampler`. In this case, a batch contains no random slices.
        start: where a new consumer starts: with the ``"oldest"`` item in the buffer, or after the
            ``"newest"``.

    Raises:
        TypeError: ``slice_len`` is not an integer. `sample` also raises TypeError if the storage is
            not part of this package.
        ValueError: ``slice_len`` is below 1.

    Writers wait for items that a consumer has not acknowledged. If a step is still outside any
    window after half the slots of the ring have been written again, writers no longer wait for the
    step. This happens at the ends of trajectories and in slow streams.

    Cost: see `SliceSampler`. The windows take 8 additional bytes of memory per item. After a write
        in place, or to explicit indices, all items are read again, which takes 50 ms per million
        items.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import LazyTensorStorage, StreamingSliceSampler
        >>> from shmbuffer import TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(16),
        ...     sampler=StreamingSliceSampler(slice_len=3),
        ...     batch_size=6,
        ... )
        >>> done = torch.zeros(7, 1, dtype=torch.bool)
        >>> value = torch.arange(7)
        >>> data = TensorDict({"value": value, ("next", "done"): done}, [7])
        >>> index = rb.extend(data)
        >>> rb.sample()["value"].tolist()
        [0, 1, 2, 3, 4, 5]

    Source: ``torchrl.data.StreamingSliceSampler``.
    """

    _state_keys = ("slice_len",)

    def __init__(
        self,
        *,
        slice_len: int,
        end_key: Key | None = None,
        end_keys: Sequence[Key] | None = None,
        traj_key: Key | None = None,
        cache_values: bool = False,
        truncated_key: Key | None = ("next", "truncated"),
        init_key: Key | None = "is_init",
        strict_length: bool = True,
        pad_output: bool = False,
        compile: bool | dict[str, Any] = False,
        span: Side | tuple[Side, Side] = False,
        use_gpu: torch.device | bool = False,
        consumer: str | None = None,
        start: Start = "oldest",
    ) -> None:
        ClaimingSampler.__init__(self, consumer, start)
        if isinstance(slice_len, bool) or not isinstance(slice_len, int):
            raise TypeError(f"slice_len must be an integer, got {slice_len!r}")
        self._windows = Windows(slice_len)
        self._apply_options(
            SliceOptions.from_arguments({**locals(), "begins": _BEGINS}), self._windows
        )
        self._units = WindowSource(self._windows, self._marks, pad=self.pad_output)
        self._drawn: deque[tuple[Any, torch.Tensor, int]] = deque(maxlen=_REMEMBERED)
        self._window_count = 0  # number of windows in the last choice; the rest are random slices

    # -- what there is -------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Number of windows that were complete at the last draw and have not been drawn yet."""
        with self._boundaries.lock:
            return self._windows.waiting

    @property
    def lost(self) -> int:
        """Number of complete windows that were lost before they were drawn.

        A window is lost if one of its items is overwritten, or about to be overwritten. Windows
        that are both completed and overwritten between two draws are not counted.
        """
        with self._boundaries.lock:
            position = self._windows.position
            return 0 if position is None else position[1]

    # -- drawing -------------------------------------------------------------------------------

    def sample(
        self, storage: Any, batch_size: int, taking: Taking | None = None
    ) -> tuple[Any, dict[Any, Any]]:
        """Draws new windows first, then random slices; see `SliceSampler.sample`.

        Raises:
            TypeError: the storage is not part of this package, so it has no ring.
            EmptyBufferError: the storage is empty. With a consumer, also raised if no window is
                left and no writer is attached.
        """
        ring = self._windows.ring_of(storage)
        if self.consumer is not None:
            self._asked = batch_size
            return self._claimed(storage, *self._sizes(batch_size), taking)
        with self._boundaries.lock:
            self._windows.race.begin(ring)
        found = SliceSampler.sample(self, storage, batch_size)
        self._remember(found)
        return found

    @property
    def _lock(self) -> Any:
        return self._boundaries.lock

    def _source(self, storage: Any, consumer: Consumer) -> WindowSource:
        self._units.begin(consumer)
        self._units.look_at(self._windows.ring_of(storage), self._boundaries.find(storage))
        return self._units

    def _exhausted(self) -> str:
        return "was given every complete window"

    def can_sample(self, storage: Any, batch_size: int) -> bool:
        """True if `sample` would return a batch without waiting.

        Without a consumer, one trajectory must be long enough. With a consumer, there must be
        enough windows that no learner has claimed.
        """
        if (consumer := self.bind(storage)) is None:
            return super().can_sample(storage, batch_size)
        return self._can_claim(storage, consumer, self._sizes(batch_size)[0])

    def _choose(self, storage: Any, table: Trajectories, count: int, steps: int) -> Cuts:
        """Chooses the next windows, and random slices for the rest of the batch."""
        return self._choose_after(np.zeros(0, np.int64), storage, table, count, steps)

    def _put(self, table: Trajectories, count: int, steps: int, out: int) -> None:
        before = self._windows.position
        found = self._window_count = self._windows.put(count, out)
        if found == count:
            return
        self._windows.help()
        try:
            super()._put(table, count - found, steps, out + 8 * steps * found)
        except RuntimeError:
            self._windows.rewind(before)
            raise

    def _choose_after(
        self, kept: Ints, storage: Any, table: Trajectories, count: int, steps: int
    ) -> Cuts:
        """Returns the windows that start at the rows ``kept``, followed by other slices.

        The other slices are the next windows and, if there are too few, random slices. There are
        ``count`` slices in total.
        """
        before = self._windows.position
        rows = np.concatenate([kept, table.rows_of(self._windows.take(count - len(kept)))])
        self._window_count = len(rows)
        if len(rows) < count:
            self._windows.help()
        trajectories = table.of_rows(rows)
        fresh = Cuts(trajectories, rows - table.starts(trajectories))
        if len(rows) == count:
            return fresh
        try:
            rest = super()._choose(storage, table, count - len(rows), steps)
        except RuntimeError:
            self._windows.rewind(before)
            raise
        return Cuts(
            np.concatenate([fresh.trajectories, rest.trajectories]),
            np.concatenate([fresh.begins, rest.begins]),
        )

    def _remember(self, found: tuple[Any, dict[Any, Any]]) -> None:
        """Remembers the result of a draw, in case its items are overwritten and it is repeated."""
        index, info = found
        self._drawn.append((index, info[GENERATION], self._window_count))

    def _revert_overtaken(self, ring: Ring, position: Any) -> None:
        with self._boundaries.lock:
            self._windows.rewind(position)
            self._windows.race.record_overtaken(ring)

    def _again(
        self, storage: Any, index: Any, taking: Taking | None = None
    ) -> tuple[Any, dict[Any, Any]]:
        """Repeats a draw because some of its items were overwritten.

        Windows whose items are all still present are kept. All other slices are replaced.
        """
        if self.consumer is not None:
            return super()._again(storage, index, taking)
        count, steps = self._sizes(self._asked)
        elements, ring = ravel(index, lanes_of(storage)), ring_of(storage)
        assert ring is not None
        _, tickets, taken = next((one for one in self._drawn if one[0] is index), _UNKNOWN)
        windows = elements[: taken * steps].reshape(-1, steps)
        with self._boundaries.lock:
            self._windows.race.record_overtaken(ring)

        def choose(table: Trajectories) -> Cuts:
            words = ring.live.words[windows.ravel() // ring.width]
            same = slots.committed(words) & (
                slots.tickets(words) == tickets[: windows.size].numpy()
            )
            same = same.reshape(-1, steps).all(1) & self._windows.are_beyond_margin(windows[:, 0])
            kept = table.rows_of(windows[same, 0])
            kept = kept[kept >= 0]
            self._windows.lose(taken - len(kept))
            return self._choose_after(kept, storage, table, count, steps)

        found = self._draw(storage, steps, choose)
        self._remember(found)
        return found

    # -- called by the buffer ----------------------------------------------------------------------

    def _loaded_into(self, storage: Any) -> None:
        ring = ring_of(storage)
        if ring is not None:
            with self._boundaries.lock:
                self._windows.loaded_into(ring)

    def _empty(self) -> None:
        with self._boundaries.lock:
            self._windows.forget()
            self._units.forget()
        super()._empty()

    def _position(self) -> Any:
        with self._boundaries.lock:
            return self._windows.position or (0, 0)

    def _rewind(self, position: Any) -> None:
        with self._boundaries.lock:
            self._windows.rewind(position)

    # -- state ---------------------------------------------------------------------------------

    def _state(self, moment: Any) -> dict[str, Any]:
        with self._boundaries.lock:
            used = self._windows.used(moment)
        return {
            "slice_len": self._windows.steps,
            "_used": as_bits(used.elements),
            "_below": used.below,
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the record of drawn windows, so that a loaded sampler draws only the others.

        Returns:
            A dict with ``slice_len``, ``_used`` and ``_below``. ``_used`` is a uint8 tensor with
                one bit per element. The bit is set if the item was in a drawn window or is in no
                window. ``_below`` is the head of the ring.
        """
        return self._state(None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of `state_dict`.

        A state of TorchRL contains no record of drawn windows, because TorchRL numbers items
        differently. Only its ``slice_len`` is compared.

        Raises:
            RuntimeError: the state has windows of a different length. Nothing was changed.
        """
        steps = int(state_dict["slice_len"])
        if steps != self._windows.steps:
            raise RuntimeError(
                f"a state of a sampler with slice_len={steps} cannot be loaded into a sampler with "
                f"slice_len={self._windows.steps}; create the sampler with slice_len={steps}"
            )
        used = Used(from_bits(state_dict.get("_used", ())), int(state_dict.get("_below", 0)))
        with self._boundaries.lock:
            self._boundaries.forget()
            self._units.forget()
            if self.consumer is None:  # with a consumer, the ledger records which items were drawn
                self._windows.load(used)
            else:
                self._windows.forget()

    def _saved(self, moment: Any, folder: Path) -> dict[str, Any]:
        return self._state(moment)

    def _apply(self, saved: dict[str, Any] | None, loaded: Loaded | None) -> None:
        if saved is None:
            return
        if loaded is not None and loaded.shift:
            moved = loaded.places(from_bits(saved["_used"]))
            saved = {**saved, "_used": as_bits(moved[moved >= 0])}
        self.load_state_dict(saved)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_drawn": deque(maxlen=_REMEMBERED)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._units = WindowSource(self._windows, self._marks, pad=self.pad_output)
