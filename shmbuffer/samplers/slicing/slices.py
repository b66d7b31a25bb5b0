"""Sampler of trajectory slices with replacement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from shmbuffer.errors import EmptyBufferError
from shmbuffer.items.keys import GENERATION, WEIGHT_KEYS
from shmbuffer.memory import Ring
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.format.leaf import Key
from shmbuffer.samplers.sampler import (
    Sampler,
    WithOrWithout,
    ask_rank,
    in_storage,
    random_numbers,
    unchanged,
)
from shmbuffer.samplers.slicing.boundaries import DONE, Boundaries
from shmbuffer.samplers.slicing.cuts import Cuts, MarkColumns, Marks, places, rows_of
from shmbuffer.samplers.slicing.options import Side, SliceOptions, Span
from shmbuffer.samplers.slicing.trajectories import LongTrajectories, Trajectories
from shmbuffer.samplers.slicing.windows import Windows
from shmbuffer.storages.storage import ring_of
from shmbuffer.tensors.form import cpu

_SHOWN = (
    *("num_slices", "slice_len", "end_key", "end_keys", "traj_key", "truncated_key"),
    *("strict_length", "pad_output", "span"),
)


class SliceSampler(Sampler, metaclass=WithOrWithout):
    """Draws slices of trajectories: first a trajectory, then the start of a slice in it.

    All trajectories that are long enough are equally likely, and so are all slices of a trajectory.
    Slices are drawn with replacement, and a batch is their concatenation.

    - A slice is contiguous in time and comes from one trajectory. It never crosses the ring's head
      or an empty slot. If several collectors write, all steps of a slice come from one collector
      that was not restarted in between.
    - The last step of a slice is marked ``True`` under ``truncated_key``, and in the entry ``done``
      at the same level. The entry ``terminated`` at this level is not changed. If items have an
      entry ``init_key``, this entry is ``True`` on the first step of a slice. The marks are entries
      of ``info`` and of the sample of a `TensorDictReplayBuffer`.
    - A trajectory that has not ended yet stops at the newest item of its collector. The death of
      the collector also ends it. Slices that reach this item are truncated there.

    A trajectory ends if ``end_key`` (or one of ``end_keys``) is true or ``traj_key`` changes. By
    default, the ids in ``("collector", "traj_ids")`` or ``"episode"`` are used if the items have
    such an entry, and ``("next", "done")`` otherwise. A flag with several numbers is true if any of
    the numbers is nonzero. Writes and assignments to the buffer or the storage are detected.
    Changes through a view of the memory, such as ``rb[:]["done"][3] = True``, are not detected.

    Args:
        num_slices: number of slices in a batch. Must divide the batch size.
        slice_len: number of steps in a slice. Must divide the batch size. Pass exactly one of
            ``num_slices`` and ``slice_len``.
        end_key: key of the flag on the last step of a trajectory.
        end_keys: several such keys. Any of these flags ends a trajectory. Keys that items lack are
            ignored.
        traj_key: key of the trajectory id. If items lack it, the end keys are used.
        step_key: key of the step number, which ``fragmented`` requires.
        fragmented: if True, the items of a trajectory can be anywhere in the storage. They are
            ordered by ``step_key``, separately for each collector. A missing step ends a
            trajectory.
        ends: bool ``[items]``, used instead of stored flags. The first item follows the last item
            unless the last item is an end. Requires ``cache_values=True``.
        trajectories: integers ``[items]``, used in the same way instead of stored ids.
        cache_values: if True, objects are read again only after a write. Tensors and records are
            never read twice.
        truncated_key: key under which the last step is marked. If None, sets no such mark.
        init_key: key under which the first step is marked. If None, sets no such mark.
        strict_length: if True, only trajectories that are long enough are drawn. If False, shorter
            trajectories are also drawn, each as a whole, and the batch is then shorter.
        pad_output: if True, the last step of a short slice is repeated until the slice has its full
            length. The entry ``("collector", "mask")``, bool ``[n]``, is ``False`` for repeated
            steps. Requires ``strict_length=False``.
        compile: has no effect.
        span: allows slices to be cut off at the start or the end of a trajectory, so that its first
            and last steps are drawn as often as the others. True allows slices of one step. An int
            ``i`` allows slices of ``slice length - i`` steps. A tuple has a value for the start and
            one for the end.
        use_gpu: has no effect, because trajectories are found on the CPU.

    Raises:
        SliceArgumentsError: (TypeError, ValueError) both or neither of ``num_slices`` and
            ``slice_len`` were passed.
        ValueError: ``num_slices`` or ``slice_len`` is below 1, ``pad_output`` was passed with
            ``strict_length``, or ``span`` is not a bool, an int or a pair of them. Also raised if
            ``fragmented`` was passed without ``step_key``, or with ``ends`` or ``trajectories``.
        RuntimeError: arguments exclude each other, or ``ends`` or ``trajectories`` were passed
            without ``cache_values``.

    Cost: 60 to 100 µs per batch of 256 at any capacity, and 80 ns per item written since the last
        draw. The first draw reads every slot, which takes 50 ms per million slots. A draw after a
        write in place, or to explicit indices, reads every slot word, which takes 2 ms per million.
        The trajectories take 12 to 16 bytes of memory per item. If the items are objects or the
        storage is a custom class, every draw reads all items again.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import LazyTensorStorage, SliceSampler
        >>> from shmbuffer import TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(8),
        ...     sampler=SliceSampler(slice_len=2),
        ...     batch_size=4,
        ... )
        >>> done = torch.tensor([0, 0, 1, 0, 0, 0, 1, 0]).bool().unsqueeze(-1)
        >>> step = torch.arange(8)
        >>> data = TensorDict({"step": step, ("next", "done"): done}, [8])
        >>> index = rb.extend(data)
        >>> sample = rb.sample()
        >>> (sample["step"][1::2] - sample["step"][::2]).tolist()
        [1, 1]
        >>> sample["next", "done"].squeeze(-1).tolist()
        [False, True, False, True]

    Source: ``torchrl.data.SliceSampler``.
    """

    num_slices: int | None
    slice_len: int | None
    end_key: Key | None
    end_keys: Sequence[Key] | None
    traj_key: Key | None
    step_key: Key | None = "step_count"  # also a class attribute, as in TorchRL
    fragmented: bool = False
    cache_values: bool
    truncated_key: Key | None
    init_key: Key | None
    strict_length: bool
    pad_output: bool
    compile: bool | dict[str, Any]
    span: Span
    use_gpu: torch.device | bool
    _in_core: bool = True  # True if the core cuts slices of full length

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Key | None = None,
        end_keys: Sequence[Key] | None = None,
        traj_key: Key | None = None,
        step_key: Key | None = "step_count",
        fragmented: bool = False,
        ends: torch.Tensor | None = None,
        trajectories: torch.Tensor | None = None,
        cache_values: bool = False,
        truncated_key: Key | None = ("next", "truncated"),
        init_key: Key | None = "is_init",
        strict_length: bool = True,
        pad_output: bool = False,
        compile: bool | dict[str, Any] = False,
        span: Side | tuple[Side, Side] = False,
        use_gpu: torch.device | bool = False,
    ) -> None:
        self._apply_options(SliceOptions.from_arguments(locals()))

    def _apply_options(self, options: SliceOptions, windows: Windows | None = None) -> None:
        """Stores the options as attributes, and creates the rules for the ends of trajectories."""
        vars(self).update(options.attributes())
        if not options.are_given and options.end_key is None and options.end_keys is None:
            self.end_key = DONE
        self._marks = Marks.from_keys(options.truncated_key, options.init_key)
        self._boundaries = Boundaries(options, self._marks.paths, windows)
        self._asked = 0  # batch size of the last draw, for `_again`

    # -- drawing -------------------------------------------------------------------------------

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Draws a batch of slices; see `Sampler.sample`.

        Args:
            storage: the storage to draw from.
            batch_size: total number of steps.

        Returns:
            Element indices, int64 ``[n]`` or a tuple of ``ndim`` such tensors, and a dict. The dict
                has the marks, bool ``[n, *shape]`` (``[n, 1]`` if no such flag is stored), with
                tuples as keys. With a ring, it also has ``"index_generation"``, int64 ``[n]``. If
                every slice has its full length, ``n`` is ``batch_size``.

        Raises:
            EmptyBufferError: the storage is empty.
            RuntimeError: ``batch_size`` is not a multiple of ``num_slices`` or ``slice_len``, no
                trajectory is long enough, or items have no entry that ends a trajectory.
            ValueError: ``span`` could remove every step from a slice.
        """
        count, steps = self._sizes(batch_size)
        self._asked = batch_size
        if self._in_core and self.strict_length and not any(self.span):
            found = self._from_columns(storage, count, steps)
            if found is not None:
                return found
        return self._draw(storage, steps, lambda table: self._choose(storage, table, count, steps))

    def can_sample(self, storage: Any, batch_size: int) -> bool:
        """True if the storage has a trajectory that is long enough.

        Raises the same exceptions as `sample` if the batch size or the items are invalid.
        """
        count, steps = self._sizes(batch_size)
        with self._boundaries.lock:
            try:
                table = self._boundaries.find(storage).table
            except EmptyBufferError:
                return False
            return self._suffice(table, table.long(self._shortest(steps)), count, steps)

    def _sampleable_count(self, storage: Any, batch_size: int) -> int:
        """Returns the number of positions where a slice can start. Takes O(trajectories)."""
        steps = self._sizes(batch_size)[1]
        with self._boundaries.lock:
            try:
                table = self._boundaries.find(storage).table
            except (EmptyBufferError, KeyError, RuntimeError):  # `sample` raises the same exception
                return 0
            found = table.long(self._shortest(steps))
            lengths = table.lengths(found[np.arange(len(found))])
        return int(np.maximum(lengths - steps + 1, 1).sum())

    def _suffice(
        self, table: Trajectories, allowed: LongTrajectories, count: int, steps: int
    ) -> bool:
        """True if a batch can be drawn from the trajectories ``allowed``."""
        return len(allowed) > 0

    def _from_columns(
        self, storage: Any, count: int, steps: int
    ) -> tuple[Any, dict[Any, Any]] | None:
        """Draws slices of full length in the C core.

        Returns:
            The result of `sample`, or None if the core cannot read the flags or if an item was
            removed during the draw.
        """
        ask_rank(self, storage)
        ring, position = ring_of(storage), self._position()
        with self._boundaries.lock:
            bounds = self._boundaries.find(storage)
            following = bounds.following
            if following is None or ring is None:
                return None
            if following.mark_columns is None:
                following.mark_columns = MarkColumns.create(self._marks, bounds.entries)
            if following.mark_columns is None:
                return None
            elements = cpu.empty(count * steps, dtype=torch.int64)
            self._put(bounds.table, count, steps, elements.data_ptr())
            found = following.flags(elements, steps)
        if found is None:
            self._revert_overtaken(ring, position)
            return None
        info, tickets = found
        info[GENERATION] = tickets
        return in_storage(storage, elements), info

    def _put(self, table: Trajectories, count: int, steps: int, out: int) -> None:
        """Draws random slices of full length, and stores their elements in memory.

        Args:
            table: the trajectories.
            count: number of slices.
            steps: number of steps in a slice.
            out: address of ``count * steps`` int64 values.
        """
        which, begins = random_numbers(self, count), random_numbers(self, count)
        if not table.slices_at(which, begins, steps, out):
            self._allowed(table, steps)  # raises RuntimeError, because no trajectory is long enough

    def _draw(
        self, storage: Any, steps: int, choose: Callable[[Trajectories], Cuts]
    ) -> tuple[Any, dict[Any, Any]]:
        """Chooses slices with ``choose``, and reads their flags and tickets.

        If an item was overwritten in the meantime, new slices are chosen.
        """
        ask_rank(self, storage)
        ring, position = ring_of(storage), self._position()

        def draw() -> tuple[Any, dict[Any, Any]] | None:
            with self._boundaries.lock:
                bounds = self._boundaries.find(storage)
                table = bounds.table
                cuts = choose(table)
                found = rows_of(table, cuts, steps, pad=self.pad_output)
                elements = table.elements_of(found.rows)
            info = self._marks.of_rows(bounds.entries, elements, found)
            if ring is not None:
                tickets = table.are_there(ring, elements)
                if tickets is None:
                    self._revert_overtaken(ring, position)
                    return None
                info[GENERATION] = torch.from_numpy(tickets)
            if cuts.weights is not None:
                weights = cuts.weights.repeat_interleave(torch.from_numpy(found.lengths))
                info = {**dict.fromkeys(WEIGHT_KEYS, weights), **info}
            return in_storage(storage, torch.from_numpy(elements)), info

        return unchanged(storage, draw, "slices")

    def _revert_overtaken(self, ring: Ring, position: Any) -> None:
        """Reverts the draws since ``position``, because their items were overwritten."""
        self._rewind(position)

    def _sizes(self, batch_size: int) -> tuple[int, int]:
        """Returns the number of slices in a batch, and the number of steps in a slice.

        Raises RuntimeError if they do not divide the batch size, and ValueError if ``span`` could
        remove every step from a slice.
        """
        count, steps = self.num_slices, self.slice_len
        name, value = ("num_slices", count) if steps is None else ("slice_len", steps)
        assert value is not None
        if batch_size % value:
            raise RuntimeError(
                f"a batch of {batch_size} is not divisible by {name}={value}; use a batch size "
                f"that is a multiple of {value}"
            )
        self.span.check(batch_size // value if steps is None else steps)
        return (value, batch_size // value) if steps is None else (batch_size // value, value)

    def _choose(self, storage: Any, table: Trajectories, count: int, steps: int) -> Cuts:
        """Chooses ``count`` slices of ``steps`` steps."""
        allowed = self._allowed(table, steps)
        chosen = allowed[random_numbers(self, count) % len(allowed)]
        return Cuts(chosen, self._begins(table, chosen, steps))

    def _allowed(self, table: Trajectories, steps: int) -> LongTrajectories:
        """Returns the trajectories that are long enough. Raises RuntimeError if there are none."""
        allowed = table.long(self._shortest(steps))
        if not len(allowed):
            raise RuntimeError(
                f"no trajectory is long enough for a slice of {steps} steps: the longest of the "
                f"{len(table)} trajectories has {table.longest} steps; sample shorter slices, or "
                "pass strict_length=False"
            )
        return allowed

    def _shortest(self, steps: int) -> int:
        """Returns the minimum length of a trajectory to draw from."""
        return steps if self.strict_length else 1

    def _begins(self, table: Trajectories, chosen: Ints, steps: int) -> Ints:
        """Chooses the first step of a slice in each trajectory, uniformly at random.

        Returns positions in the trajectories, int64 ``[n]``; see `Cuts.begins`.
        """
        first, count = places(table.lengths(chosen), steps, self.span)
        return first + random_numbers(self, len(chosen)) % count

    def _size_of(self, index: Any) -> int:
        """Returns the batch size of a draw. Short slices make ``index`` shorter than that."""
        is_full_length = self.strict_length and not any(self.span)
        return super()._size_of(index) if is_full_length else self._asked

    # -- the rest ------------------------------------------------------------------------------

    def _empty(self) -> None:
        self._boundaries.forget()
        super()._empty()

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in _SHOWN)
        return f"{type(self).__name__}({values})"
