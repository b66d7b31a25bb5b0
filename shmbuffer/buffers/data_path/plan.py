"""The path of data through a buffer, which depends on its storage, sampler, writer and options.

    write    fast       one native call checks and writes a batch (`FastWrite`)
             whole      storage.append writes a batch with its priorities atomically
             by parts   writer ──▶ storage.set ──▶ sampler.extend
    sample   fast       one native call draws, gathers and weights (`FastRead`) a TensorDict
             whole      storage.draw does this for any items, then collate_fn and transforms
             by parts   sampler.sample ──▶ storage.get, or one native call (`FastRead.read`)

Invariants:
  1. A plan does not change. The buffer makes a new plan if its storage, sampler or writer is
     replaced, or if the storage has a new ring or rows with another schema.
  2. All paths give the same result. If a shorter path cannot handle a call, it returns None, and
     the next longer path is used.
  3. A plan contains the reason why a shorter path is not used; see ``print(buffer.plan)``.

Transforms can be appended at any time, so the list of transforms is read before each call.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from shmbuffer.buffers.data_path.fast_read import FastRead
from shmbuffer.buffers.data_path.fast_write import FastWrite
from shmbuffer.buffers.data_path.prefetch import Prefetcher
from shmbuffer.buffers.data_path.sample_info import SampleInfo
from shmbuffer.items.limits import Limits
from shmbuffer.samplers.priority.prioritized import PrioritizedSampler
from shmbuffer.samplers.random import RandomSampler
from shmbuffer.samplers.sampler import Sampler
from shmbuffer.samplers.taking import consumes
from shmbuffer.storages.movers.tensor_rows import Rows
from shmbuffer.storages.ring_backed import RingBacked
from shmbuffer.storages.storage import Storage, ring_of
from shmbuffer.storages.tensor import TensorStorage
from shmbuffer.torchrl.transforms import Transform
from shmbuffer.units.unit import SampleUnit, Transition
from shmbuffer.writers.round_robin import RoundRobinWriter
from shmbuffer.writers.writer import Writer

_NOT_YET = "nothing was written yet"
_OWN_TABLE = "the sampler keeps priorities in its own table"


class Plan:
    """The paths of data through one buffer.

    Args:
        parts: the `Parts` of the buffer.

    Attributes:
        fast_write: the fast path for writes, or None.
        fast: object that reads TensorDicts in one native call, or None. It is also set if the
            sampler draws in Python or if batches are prefetched.
        fast_read: the fast path for samples, or None.
        appends: True if storage.append writes a batch.
        draws: True if storage.draw draws a batch.
        why_write: reason why no shorter path for writes is used, or an empty string.
        why_sample: reason why no shorter path for samples is used, or an empty string.
        gives_priorities: True if a write also sets the priorities of the items.
        tells_sampler: True if the methods ``add`` and ``extend`` of the sampler are called.
        updates: the sampler if its ring accepts the priorities of a sample unchanged, or None.
        rewrites: True if data are converted before a write, apart from transforms.
        reader: object that reads complete samples for the sample unit. With None, the items are
            read and then assembled.
        info: which entries a sample has in addition to the items.
        limits: flow control for samples.

    Raises:
        ValueError: ``prefetch`` or a sample unit is combined with a sampler that has a consumer.
    """

    fast_write: FastWrite | None
    fast: FastRead | None
    fast_read: FastRead | None
    appends: bool
    draws: bool
    why_write: str
    why_sample: str
    gives_priorities: bool
    tells_sampler: bool
    updates: PrioritizedSampler | None
    rewrites: bool
    reader: Any
    info: SampleInfo
    limits: Limits

    def __init__(self, parts: Any) -> None:
        self.storage: Storage = parts.storage
        self.sampler: Sampler = parts.sampler
        self.transforms: list[Transform] = parts.transform.transforms
        self.prefetcher: Prefetcher | None = parts.prefetcher
        self.shared: bool = parts.shared
        storage, sampler = self.storage, self.sampler
        self.ring_backed = backed = storage if isinstance(storage, RingBacked) else None
        self.payload: Any = None if backed is None else backed._mover or backed.mover()
        unit = parts.unit
        self.unit: SampleUnit | None = None if type(unit) is Transition else unit
        self.reader = self._reader_of(parts)
        self.by_priority = by = sampler if isinstance(sampler, PrioritizedSampler) else None
        plain = type(sampler).update_priority is PrioritizedSampler.update_priority
        as_they_come = plain and self.unit is None and not parts.dim_extend
        self.updates = by if as_they_come else None
        self._samples_tensordicts = parts.mapping == "tensordict"
        ring = ring_of(storage)
        self._own_table = self.by_priority is not None and self.by_priority.ring() is not ring
        self._choose_write(parts.writer, parts.dim_extend, parts.priority_key)
        self._choose_sample(parts)
        self.limiter_version = self.limits.version

    def _reader_of(self, parts: Any) -> Any:
        """Returns an object that reads complete samples for the sample unit, or None.

        See `SampleUnit._reader`.
        """
        storage, rows = self.storage, self.payload
        if self.unit is None or parts.collate_fn is not None or not storage.draws_natively:
            return None
        return self.unit._reader(rows) if isinstance(rows, Rows) else None

    def _choose_write(
        self, writer: Writer, dim_extend: int, priority_key: str | tuple[str, ...] | None
    ) -> None:
        """Chooses the path for writes."""
        storage, sampler, by_priority = self.storage, self.sampler, self.by_priority
        rule = Sampler if by_priority is None else PrioritizedSampler
        tells = type(sampler).add is not rule.add or type(sampler).extend is not rule.extend
        by_parts = _first(
            (not storage.writes_natively, f"a {_name(storage)} has no native write"),
            (
                type(writer).add is not RoundRobinWriter.add
                or type(writer).extend is not RoundRobinWriter.extend,
                f"a {_name(writer)} chooses the slots of items",
            ),
        )
        why = by_parts or _first(
            (not isinstance(storage, TensorStorage), f"a {_name(storage)} has no columns"),
            (tells, f"a {_name(sampler)} is notified of writes"),
            (dim_extend != 0, f"batches are appended along dimension {dim_extend}"),
            (self.payload is None, _NOT_YET),
            (self._own_table, _OWN_TABLE),
        )
        self.fast_write = None
        if not why and isinstance(storage, TensorStorage):
            if storage.appends_natively:
                key = None if by_priority is None else priority_key
                self.fast_write = FastWrite.into(storage, key)
            if self.fast_write is None:
                why = "one native call cannot write items with this schema into this storage"
        self.why_write = why
        self.appends = not by_parts
        self.tells_sampler = tells
        self.gives_priorities = (
            by_priority is not None and storage.writes_natively and not self._own_table
        )
        self.rewrites = dim_extend != 0 or (
            self._samples_tensordicts and not isinstance(storage, TensorStorage)
        )

    def _choose_sample(self, parts: Any) -> None:
        """Chooses the path for samples."""
        storage, sampler, by_priority = self.storage, self.sampler, self.by_priority
        writer, prefetcher = parts.writer, self.prefetcher
        uniform = type(sampler).sample is RandomSampler.sample
        own_draw = _first(
            (
                not uniform
                and (by_priority is None or type(sampler).sample is not PrioritizedSampler.sample),
                f"a {_name(sampler)} draws",
            ),
            (self._own_table, _OWN_TABLE),
        )
        more = _first(
            (not storage.draws_natively, f"a {_name(storage)} has no native draw"),
            (parts.goals is not None, "hindsight also chooses items"),
        )
        makes_more = "" if self.unit is None else f"a {_name(self.unit)} expands the drawn items"
        device = getattr(storage, "device", None)
        leaves = getattr(self.payload, "leaves", None)
        by_parts = own_draw or more or makes_more
        why = more or _first(
            (bool(makes_more) and self.reader is None, makes_more),
            (not self._samples_tensordicts, "samples do not have index and weights as entries"),
            (not isinstance(storage, TensorStorage), f"a {_name(storage)} has no columns"),
            (parts.collate_fn is not None, "there is a collate_fn"),
            (parts.pin_memory, "samples are in pinned memory"),
            (device is not None and device.type != "cpu", f"samples are on {device}"),
            (self.payload is None, _NOT_YET),
            (not (leaves is None or leaves.is_flat), "items are not plain TensorDicts"),
        )
        ahead = _first((prefetcher is not None, "samples are prefetched"))
        self.why_sample = own_draw or why or ahead
        tracked = storage.tracks_generations and (
            isinstance(writer, RoundRobinWriter) and writer.track_generations
        )
        is_consumed = consumes(sampler)
        if is_consumed and (prefetcher is not None or self.unit is not None):
            what = "prefetch" if self.unit is None else "a sample_unit"
            raise ValueError(
                f"{what} is not supported with a {_name(sampler)} that has a consumer; omit "
                f"{what.removeprefix('a ')}, or use a sampler without a consumer"
            )
        dtype = None if by_priority is None else by_priority.dtype
        self.info = SampleInfo(parts.weight_keys, dtype, tracked or self.shared or is_consumed)
        self.draws = not by_parts
        self.fast = None
        if not why and isinstance(storage, TensorStorage):
            self.fast = FastRead(
                storage, self.payload, sampler, by_priority, self.info, self.reader
            )
        self.fast_read = None if own_draw or ahead else self.fast
        chooses = _first(
            (prefetcher is not None, "prefetch"),
            (parts.goals is not None, "hindsight"),
            (self.unit is not None, f"a {_name(self.unit)}"),
            (not uniform, f"a {_name(sampler)}"),
        )
        self.limits = Limits(self.ring_backed, chooses)

    def choosing(self) -> AbstractContextManager[Any]:
        """Returns a context manager for draws.

        With prefetching, it holds a lock, because another thread can draw at the same time.
        """
        return nullcontext() if self.prefetcher is None else self.prefetcher.choosing

    def __repr__(self) -> str:
        transformed = "transforms are called" if self.transforms else ""
        ways = {
            "write": _way(self.fast_write, self.appends, transformed or self.why_write),
            "sample": _way(
                None if transformed else self.fast_read, self.draws, transformed or self.why_sample
            ),
        }
        said = ["index"]
        if self.info.weight_dtype is not None:
            said += self.info.weight_keys
        if self.info.generation:
            said.append("index_generation")
        lines = [*(f"{name}: {way}" for name, way in ways.items()), f"info: {', '.join(said)}"]
        if self.prefetcher is not None:
            lines.append(f"prefetched: {self.prefetcher.hand_over}")
        if self.limits.hold:
            lines.append("samples wait for the rate limiter")
        return "Plan(\n    " + "\n    ".join(lines) + "\n)"


def _name(part: Any) -> str:
    return type(part).__name__


def _first(*reasons: tuple[bool, str]) -> str:
    """Returns the first reason whose condition is true, or an empty string."""
    return next((words for holds, words in reasons if holds), "")


def _way(fast: object, whole: bool, why: str) -> str:
    if fast is not None:
        return "fast" + (f", after conversion: {why}" if why else "")
    return f"{'whole' if whole else 'by parts'}: {why}"
