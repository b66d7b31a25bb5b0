"""Which way data take through a buffer: decided once from its parts, and read in one place.

    write    fast       one native call checks and writes a batch (`FastWrite`)
             whole      storage.append: a batch with its priorities, whole or not at all
             by parts   writer ──▶ storage.set, then the sampler is told
    sample   fast       one native call draws, gathers and weighs (`FastRead`), a TensorDict over it
             whole      storage.draw does the same for any items, then collate_fn and transforms
             by parts   sampler.sample ──▶ storage.get

Always true
  1. A plan does not change. The buffer makes another one where a part is exchanged, and where the
     storage has got a ring, another ring, or rows of another form since.
  2. A shorter way does what the longer ones do. Where it cannot, it answers None and the next
     longer one is taken.
  3. A plan knows why a way is not shorter: ``print(buffer.plan)``.

Transforms may be appended at any time, so the list of them is looked at before each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from shmbuffer.replay.buffers.fast_read import FastRead
from shmbuffer.replay.buffers.fast_write import FastWrite
from shmbuffer.replay.buffers.limits import Limits
from shmbuffer.replay.buffers.prefetch import Prefetcher
from shmbuffer.replay.buffers.sample_info import SampleInfo
from shmbuffer.replay.samplers import PrioritizedSampler, RandomSampler, Sampler
from shmbuffer.replay.storages import Storage
from shmbuffer.replay.storages.ring_backed import RingBacked
from shmbuffer.replay.storages.storage import ring_of
from shmbuffer.replay.storages.tensor import TensorStorage
from shmbuffer.replay.transforms import Transform
from shmbuffer.replay.writers import RoundRobinWriter, Writer

_NOT_YET = "nothing was written yet"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Plan:
    """The ways of one buffer; see the module.

    Attributes:
        storage: where the items are.
        ring_backed: the storage, where it is one of this package.
        sampler: who draws.
        by_priority: the sampler, where it draws by priority.
        transforms: as they are now, and will be.
        prefetcher: what makes batches ahead; None: nothing.
        payload: what moves the items of a ring-backed storage; None before the first write.
        shared: whether somebody else may write over items.
        info: what samples have beside their items.
        limits: what they wait for.
        limiter_version: of ``limits``; ``[0]`` is 0 where nothing was ever limited.
        rewrites: whether data are not written as they come, transforms left aside.
        fast_write: the fast way in; None: there is none.
        appends: whether a batch is written whole.
        gives_priorities: whether a write gives the items their priorities.
        tells_sampler: whether the sampler is told what was written.
        fast_read: the fast way out; None: there is none.
        draws: whether a batch is drawn whole.
        why_write: why there is no shorter way in; empty where there is none.
        why_sample: the same of the way out.
    """

    storage: Storage
    ring_backed: RingBacked | None
    sampler: Sampler
    by_priority: PrioritizedSampler | None
    transforms: list[Transform]
    prefetcher: Prefetcher | None
    payload: Any
    shared: bool
    info: SampleInfo
    limits: Limits
    limiter_version: Sequence[int]
    rewrites: bool
    fast_write: FastWrite | None
    appends: bool
    gives_priorities: bool
    tells_sampler: bool
    fast_read: FastRead | None
    draws: bool
    why_write: str
    why_sample: str

    def is_current(self) -> bool:
        """Whether the items are still where they were."""
        backed = self.ring_backed
        return backed is None or self.payload is (backed._mover or backed.mover())

    def choosing(self) -> AbstractContextManager[Any]:
        """Held while the sampler is asked, where threads make batches ahead."""
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
        if self.limits.hold:
            lines.append("samples wait for the rate limiter")
        return "Plan(\n    " + "\n    ".join(lines) + "\n)"


def plan(
    storage: Storage,
    sampler: Sampler,
    writer: Writer,
    transforms: list[Transform],
    *,
    collates: bool,
    pins: bool,
    prefetcher: Prefetcher | None,
    dim_extend: int,
    shared: bool,
    weight_keys: tuple[str, ...],
    tensordicts: bool,
    priority_key: str | tuple[str, ...] | None,
) -> Plan:
    """Decide which ways the data of a buffer take.

    Args:
        storage: where the items are.
        sampler: who draws; it knows the storage already.
        writer: who decides where the next item goes.
        transforms: of the buffer; the list, which may grow.
        collates: whether there is a ``collate_fn``.
        pins: whether samples are in pinned memory.
        prefetcher: what makes batches ahead.
        dim_extend: dimension of the data along which batches are appended.
        shared: whether somebody else may write over items.
        weight_keys: names of the importance weights.
        tensordicts: whether samples are TensorDicts that have their index and weights as entries.
        priority_key: entry of such data that holds priorities.
    """
    backed = storage if isinstance(storage, RingBacked) else None
    payload: Any = None if backed is None else backed._mover or backed.mover()
    ring = ring_of(storage)
    by_priority = sampler if isinstance(sampler, PrioritizedSampler) else None
    ours = type(sampler).sample is RandomSampler.sample or (
        by_priority is not None and type(sampler).sample is PrioritizedSampler.sample
    )
    own_table = by_priority is not None and by_priority.ring() is not ring
    rule = Sampler if by_priority is None else PrioritizedSampler
    tells = type(sampler).add is not rule.add or type(sampler).extend is not rule.extend

    by_parts = _first(
        (not storage.writes_natively, f"a {_name(storage)} does not write by itself"),
        (
            type(writer).add is not RoundRobinWriter.add
            or type(writer).extend is not RoundRobinWriter.extend,
            f"a {_name(writer)} decides where items go",
        ),
    )
    fast_write = None
    why_write = by_parts or _first(
        (not isinstance(storage, TensorStorage), f"a {_name(storage)} has no columns"),
        (tells, f"a {_name(sampler)} is told of writes"),
        (dim_extend != 0, f"batches are appended along dimension {dim_extend}"),
        (payload is None, _NOT_YET),
        (own_table, "the sampler keeps priorities in a table of its own"),
    )
    if not why_write and isinstance(storage, TensorStorage):
        if storage.appends_natively:
            fast_write = FastWrite.into(storage, None if by_priority is None else priority_key)
        if fast_write is None:
            why_write = "items of this form, or in this place, are not written by one native call"

    choice = _first(
        (not storage.draws_natively, f"a {_name(storage)} does not draw by itself"),
        (not ours, f"a {_name(sampler)} draws"),
        (own_table, "the sampler keeps priorities in a table of its own"),
    )
    device = getattr(storage, "device", None)
    leaves = getattr(payload, "leaves", None)
    why_sample = choice or _first(
        (not tensordicts, "samples do not have index and weights as entries"),
        (not isinstance(storage, TensorStorage), f"a {_name(storage)} has no columns"),
        (collates, "there is a collate_fn"),
        (pins, "samples are in pinned memory"),
        (prefetcher is not None, "samples are made ahead"),
        (device is not None and device.type != "cpu", f"samples are on {device}"),
        (payload is None, _NOT_YET),
        (not (leaves is None or leaves.is_flat), "items are no plain TensorDicts"),
    )
    tracked = storage.tracks_generations and (
        isinstance(writer, RoundRobinWriter) and writer.track_generations
    )
    info = SampleInfo(
        weight_keys, None if by_priority is None else by_priority.dtype, tracked or shared
    )
    fast_read = None
    if not why_sample and isinstance(storage, TensorStorage):
        fast_read = FastRead(storage, payload, sampler, by_priority, info)
    chooses = "prefetch" if prefetcher is not None else f"a {_name(sampler)}"
    uniform = prefetcher is None and type(sampler).sample is RandomSampler.sample
    limits = Limits(storage, "" if uniform else chooses)
    return Plan(
        storage=storage,
        ring_backed=backed,
        sampler=sampler,
        by_priority=by_priority,
        transforms=transforms,
        prefetcher=prefetcher,
        payload=payload,
        shared=shared,
        info=info,
        limits=limits,
        limiter_version=limits.version,
        rewrites=dim_extend != 0 or (tensordicts and not isinstance(storage, TensorStorage)),
        fast_write=fast_write,
        appends=not by_parts,
        gives_priorities=by_priority is not None and storage.writes_natively and not own_table,
        tells_sampler=tells,
        fast_read=fast_read,
        draws=not choice,
        why_write=why_write,
        why_sample=why_sample,
    )


def _name(part: Any) -> str:
    return type(part).__name__


def _first(*reasons: tuple[bool, str]) -> str:
    """The first reason that holds; empty if none does."""
    return next((words for holds, words in reasons if holds), "")


def _way(fast: object, whole: bool, why: str) -> str:
    if fast is not None:
        return "fast" + (f", after conversion: {why}" if why else "")
    return f"{'whole' if whole else 'by parts'}: {why}"
