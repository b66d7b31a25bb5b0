"""Slices of trajectories, with replacement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shmbuffer.errors import EmptyBufferError
from shmbuffer.numpy.keys import GENERATION, WEIGHT_KEYS
from shmbuffer.replay.samplers.sampler import (
    ATTEMPTS,
    Sampler,
    WithOrWithout,
    ask_rank,
    drawn_by,
    in_storage,
)
from shmbuffer.replay.samplers.slicing.arguments import at_least_one, check_together
from shmbuffer.replay.samplers.slicing.boundaries import DONE, Boundaries
from shmbuffer.replay.samplers.slicing.columns import Shown
from shmbuffer.replay.samplers.slicing.cutting import Cuts, Side, Span, places, rows_of
from shmbuffer.replay.samplers.slicing.marks import Marks
from shmbuffer.replay.storages.storage import ring_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shmbuffer.memory import Ring
    from shmbuffer.numpy.arrays import Ints
    from shmbuffer.replay.samplers.slicing.entries import Key
    from shmbuffer.replay.samplers.slicing.trajectories import Long, Trajectories

_NUMBERS = 2**62  # random numbers below this, modulo what is wanted: the bias is below 2**-30
_SHOWN = (
    *("num_slices", "slice_len", "end_key", "end_keys", "traj_key", "truncated_key"),
    *("strict_length", "pad_output", "span"),
)


class SliceArgumentsError(TypeError, ValueError):
    """``num_slices`` and ``slice_len``: exactly one of them. A TypeError for TorchRL."""


class SliceSampler(Sampler, metaclass=WithOrWithout):
    """Slices of trajectories: a trajectory is chosen, then where the slice begins in it.

    Every trajectory that is long enough is as likely as any other, and in it every slice. With
    replacement. A batch is one slice behind the other.

    - A slice is contiguous in time and of one trajectory. It never lies across the place where the
      ring writes next, nor across a place without an item. In a buffer that several collectors
      write, it is of one of them, and of one life of it.
    - Its last step is marked ``True`` under ``truncated_key`` and ``done`` beside it;
      ``terminated`` beside it stays what is stored. Where there is an entry ``init_key``, the first
      step is marked there. They are entries of a `TensorDictReplayBuffer`'s sample, and in the
      ``info`` of any.
    - The newest item of each collector ends a trajectory that is still open, or that its death has
      left open: slices that reach it are truncated there like any other.

    Trajectories end where ``end_key`` (or one of ``end_keys``) is true, or where ``traj_key``
    changes; where both are given, at both. Without either, the ids under ``("collector",
    "traj_ids")`` or ``"episode"`` are used where the items have them, else ``("next", "done")``. A
    flag of several numbers is true where any of them is.

    Args:
        num_slices: slices of a batch; the batch size is a multiple of it.
        slice_len: steps of a slice; the batch size is a multiple of it. Exactly one of the two.
        end_key: flag of the last step of a trajectory.
        end_keys: several, combined with or; those that the items have not are left out.
        traj_key: id of the trajectory. Where the items have it not, end keys are used.
        step_key: number of the step, for ``fragmented``.
        fragmented: the items of a trajectory lie anywhere; ``traj_key`` and ``step_key`` put them
            in order. A step that is missing cuts. Of each collector for itself.
        ends: bool ``[items]``, in place of what is stored: the storage is taken as a full circle,
            so that the first item follows the last one unless that is an end. Needs
            ``cache_values=True``.
        trajectories: integers ``[items]``, the same with ids.
        cache_values: while nothing is written, items that are objects are not read again. Of
            tensors and records only what was written is read in any case.
        truncated_key: see above; None marks nothing.
        init_key: see above; None marks nothing.
        strict_length: True draws from trajectories that are long enough only. False takes shorter
            ones whole, and the batch is shorter than was asked for.
        pad_output: repeat the last step of a short slice, so that the batch has its size; real
            steps are ``True`` under ``("collector", "mask")``, ``[n]``. Needs
            ``strict_length=False``.
        compile: accepted; nothing here is compiled.
        span: let slices be cut off at the beginning or end of a trajectory, so that its first and
            last steps are drawn as often as others: True down to one step, an int i down to
            ``slice length - i``. A tuple: at its beginning, at its end.
        use_gpu: accepted; trajectories are found on the CPU.

    Raises:
        SliceArgumentsError: (TypeError, ValueError) both or none of ``num_slices``, ``slice_len``.
        ValueError: a number below 1; ``pad_output`` with ``strict_length``; a ``span`` that is no
            bool, int or pair of them; ``fragmented`` without ``step_key`` or with given tensors.
        RuntimeError: arguments that exclude each other, or ``ends`` or ``trajectories`` without
            ``cache_values``.

    A change of what is stored is seen where it was a write, or an assignment to the buffer or its
    storage. One through a view of the memory, ``rb[:]["done"][3] = True``, is not.

    Cost: 80 ns an item that was written since the draw before, and 60 to 100 µs a batch of 256,
        however large the buffer is.
        The first draw looks at every slot, 50 ms a million; one after a write into named slots, or
        in place, at every slot's word, 2 ms a million. 12 to 16 bytes an item. Items that are
        objects, and those of a storage of somebody else's, are all read again for each draw.

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

    step_key: Key | None = "step_count"  # of the class too, as in TorchRL
    fragmented: bool = False
    _in_core: bool = True  # where its slices are cut, if they have their full length

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
        if (num_slices is None) == (slice_len is None):
            raise SliceArgumentsError(
                f"give num_slices or slice_len, one of the two; got num_slices={num_slices} and "
                f"slice_len={slice_len}"
            )
        self.num_slices = at_least_one("num_slices", num_slices)
        self.slice_len = at_least_one("slice_len", slice_len)
        check_together(
            end_key=end_key,
            end_keys=end_keys,
            traj_key=traj_key,
            step_key=step_key,
            fragmented=fragmented,
            ends=ends,
            trajectories=trajectories,
            cache_values=cache_values,
            strict_length=strict_length,
            pad_output=pad_output,
        )
        self.end_key = end_key
        self.end_keys = None if end_keys is None else tuple(end_keys)
        if end_key is None and end_keys is None and ends is None and trajectories is None:
            self.end_key = DONE
        self.traj_key = traj_key
        self.step_key = step_key
        self.fragmented = bool(fragmented)
        self.cache_values = bool(cache_values)
        self.truncated_key = truncated_key
        self.init_key = init_key
        self.strict_length = bool(strict_length)
        self.pad_output = bool(pad_output)
        self.compile = compile
        self.span = Span.of(span)
        self.use_gpu = use_gpu
        self._marks = Marks.of(truncated_key, init_key)
        self._boundaries = Boundaries(
            end_key=end_key,
            end_keys=end_keys,
            traj_key=traj_key,
            step_key=step_key if fragmented else None,
            ends=ends,
            trajectories=trajectories,
            cache_values=self.cache_values,
            others=self._marks.paths,
        )
        self._asked = 0  # the last batch size, of which `_again` makes one more

    # -- drawing -------------------------------------------------------------------------------

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Draw; see `Sampler.sample`.

        Args:
            storage: where from.
            batch_size: steps of all slices together.

        Returns:
            Element indices int64 ``[n]``, or a tuple of ``ndim`` of them, and the marks of the
            steps, bool ``[n, *shape]`` (``[n, 1]`` where nothing of the kind is stored), by tuples
            as keys; with a ring ``"index_generation"``, int64 ``[n]``. n is ``batch_size`` where
            every slice has its full length.

        Raises:
            EmptyBufferError: nothing to draw from.
            RuntimeError: ``batch_size`` is no multiple, no trajectory is long enough, or nothing
                says where one ends.
            ValueError: ``span`` would leave nothing of a slice.
        """
        count, steps = self._sizes(batch_size)
        self._asked = batch_size
        if self._in_core and self.strict_length and not any(self.span):
            found = self._from_columns(storage, count, steps)
            if found is not None:
                return found
        return self._draw(storage, steps, lambda table: self._choose(storage, table, count, steps))

    def can_sample(self, storage: Any, batch_size: int) -> bool:
        """See `Sampler.can_sample`: a trajectory is long enough. Raises as `sample` does."""
        count, steps = self._sizes(batch_size)
        with self._boundaries.lock:
            try:
                table = self._boundaries.of(storage).table
            except EmptyBufferError:
                return False
            return self._suffice(table, table.long(self._shortest(steps)), count, steps)

    def _sampleable_count(self, storage: Any, batch_size: int) -> int:
        """Places where a slice can begin; O(trajectories)."""
        steps = self._sizes(batch_size)[1]
        with self._boundaries.lock:
            try:
                table = self._boundaries.of(storage).table
            except (EmptyBufferError, KeyError, RuntimeError):  # it cannot be sampled
                return 0
            found = table.long(self._shortest(steps))
            lengths = table.lengths[found[np.arange(len(found))]]
        return int(np.maximum(lengths - steps + 1, 1).sum())

    def _suffice(self, table: Trajectories, allowed: Long, count: int, steps: int) -> bool:
        """Whether trajectories that may be drawn from make a batch."""
        return len(allowed) > 0

    def _from_columns(
        self, storage: Any, count: int, steps: int
    ) -> tuple[Any, dict[Any, Any]] | None:
        """Slices of their full length, where the core reads the flags; None: another way."""
        ask_rank(self, storage)
        ring, position = ring_of(storage), self._position()
        with self._boundaries.lock:
            bounds = self._boundaries.of(storage)
            following = bounds.following
            if following is None or ring is None:
                return None
            if following.shown is None:
                following.shown = Shown.of(self._marks, bounds.entries)
            if following.shown is None:
                return None
            elements = torch.empty(count * steps, dtype=torch.int64)
            self._put(bounds.table, count, steps, elements.data_ptr())
            found = following.flags(elements, steps)
        if found is None:
            self._overtaken(ring, position)
            return None
        info, tickets = found
        info[GENERATION] = tickets
        return in_storage(storage, elements), info

    def _put(self, table: Trajectories, count: int, steps: int, out: int) -> None:
        """The elements of slices at random, into memory that is there."""
        which, begins = self._numbers(count), self._numbers(count)
        if not table.slices_at(which, begins, steps, out):
            self._allowed(table, steps)  # says why there is none

    def _draw(
        self, storage: Any, steps: int, choose: Callable[[Trajectories], Cuts]
    ) -> tuple[Any, dict[Any, Any]]:
        """Choose slices that are still there once their flags were read."""
        ask_rank(self, storage)
        ring, position = ring_of(storage), self._position()
        for attempt in range(ATTEMPTS):
            if attempt > 1 and ring is not None:
                ring.totals()  # takes the mutex: who is marking slots is done, or was repaired
            with self._boundaries.lock:
                bounds = self._boundaries.of(storage)
                table = bounds.table
                cuts = choose(table)
                found = rows_of(table, cuts, steps, pad=self.pad_output)
                elements = table.elements_of(found.rows)
            info = self._marks.of_rows(bounds.entries, elements, found)
            if ring is None:
                break
            tickets = table.are_there(ring, elements)
            if tickets is not None:
                info[GENERATION] = torch.from_numpy(tickets)
                break
            self._overtaken(ring, position)
        else:
            raise RuntimeError(
                f"slices were written over each of the {ATTEMPTS} times that they were chosen; "
                "make the buffer larger, or write slower"
            )
        if cuts.weights is not None:
            weights = cuts.weights.repeat_interleave(torch.from_numpy(found.lengths))
            info = {**dict.fromkeys(WEIGHT_KEYS, weights), **info}
        return in_storage(storage, torch.from_numpy(elements)), info

    def _overtaken(self, ring: Ring, position: Any) -> None:
        """What was chosen since that position was written over."""
        self._rewind(position)

    def _sizes(self, batch_size: int) -> tuple[int, int]:
        """Slices of a batch, and steps of a slice."""
        count, steps = self.num_slices, self.slice_len
        name, value = ("num_slices", count) if steps is None else ("slice_len", steps)
        assert value is not None
        if batch_size % value:
            raise RuntimeError(
                f"a batch of {batch_size} is not divisible by {name}={value}; draw a multiple of it"
            )
        self.span.check(batch_size // value if steps is None else steps)
        return (value, batch_size // value) if steps is None else (batch_size // value, value)

    def _choose(self, storage: Any, table: Trajectories, count: int, steps: int) -> Cuts:
        """Where the next slices are cut out."""
        allowed = self._allowed(table, steps)
        chosen = allowed[self._numbers(count) % len(allowed)]
        return Cuts(chosen, self._begins(table, chosen, steps))

    def _allowed(self, table: Trajectories, steps: int) -> Long:
        """Trajectories that may be drawn from."""
        allowed = table.long(self._shortest(steps))
        if not len(allowed):
            raise RuntimeError(
                f"no trajectory has sufficient length for a slice of {steps} steps: the longest of "
                f"{len(table)} has {table.longest}; draw shorter slices, or give "
                "strict_length=False"
            )
        return allowed

    def _shortest(self, steps: int) -> int:
        """How many steps a trajectory needs to be drawn from."""
        return steps if self.strict_length else 1

    def _begins(self, table: Trajectories, chosen: Ints, steps: int) -> Ints:
        """A step of each trajectory to begin at, uniformly over those that are possible."""
        first, count = places(table.lengths[chosen], steps, self.span)
        return first + self._numbers(len(chosen)) % count

    def _numbers(self, count: int) -> Ints:
        """Random numbers below `_NUMBERS`."""
        numbers: Ints = drawn_by(self, torch.randint, _NUMBERS, (count,)).numpy()
        return numbers

    def _again(self, storage: Any, index: Any) -> tuple[Any, dict[Any, Any]]:
        """Another draw of the last size; of short slices the index does not tell it."""
        rows = len(index[0] if isinstance(index, tuple) else index)
        whole = self.strict_length and not any(self.span)
        return self.sample(storage, rows if whole else self._asked)

    # -- the rest ------------------------------------------------------------------------------

    def _empty(self) -> None:
        self._boundaries.forget()
        super()._empty()

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in _SHOWN)
        return f"{type(self).__name__}({values})"
