"""Creates a buffer from the class and the arguments that its directory records."""

from __future__ import annotations

from typing import Any

from shmbuffer.buffers.data_path.parts import made
from shmbuffer.buffers.prioritized_buffers import (
    Prioritized,
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
)
from shmbuffer.buffers.replay_buffer import ReplayBuffer
from shmbuffer.buffers.tensordict import TensorDictReplayBuffer
from shmbuffer.memory import Engine
from shmbuffer.memory.mapped import recorded
from shmbuffer.samplers.priority.prioritized import PrioritizedSampler
from shmbuffer.storages.lazy_memmap import LazyMemmapStorage
from shmbuffer.storages.lazy_stack import LazyStackStorage
from shmbuffer.storages.record_list import RecordList
from shmbuffer.storages.storage import Storage

FAMILY: dict[str, type[ReplayBuffer]] = {
    cls.family: cls
    for cls in (
        ReplayBuffer,
        TensorDictReplayBuffer,
        PrioritizedReplayBuffer,
        TensorDictPrioritizedReplayBuffer,
    )
}
"""Classes that a directory can record. Buffers of subclasses are opened as one of these classes."""

_DEFAULT_ALPHA, _DEFAULT_BETA = 0.6, 0.4


def from_engine(engine: Engine, **overrides: Any) -> ReplayBuffer:
    """Creates a buffer for an open directory, from the recorded class and arguments.

    Args:
        engine: the open directory.
        **overrides: arguments of the constructor that replace the recorded arguments.

    Raises:
        ValueError: a sampler in ``overrides`` has another alpha or eps than the directory.
    """
    settings, ring = engine.settings, engine.ring()
    extra = recorded.read_buffer_arguments(settings, engine.where)
    prioritized = settings.alpha is not None or (ring is not None and ring.tree.prioritized)
    usual = TensorDictPrioritizedReplayBuffer if prioritized else TensorDictReplayBuffer
    cls = FAMILY.get(extra.get("buffer", ""), usual)

    names = ["batch_size", "dim_extend", "weight_key"]
    if issubclass(cls, TensorDictReplayBuffer):
        names.append("priority_key")
    if issubclass(cls, Prioritized):
        names.append("reduction")
    arguments = {name: extra[name] for name in names if extra.get(name) is not None}
    if isinstance(arguments.get("priority_key"), list):
        arguments["priority_key"] = tuple(arguments["priority_key"])  # JSON has no tuples
    if extra.get("track_generations"):
        arguments["writer"] = cls.default_writer(track_generations=True)

    # Alpha and eps can have changed since they were recorded, so the current values are used.
    alpha = settings.alpha if ring is None or not ring.tree.prioritized else ring.tree.alpha
    priorities: dict[str, Any] = {
        "alpha": _DEFAULT_ALPHA if alpha is None else alpha,
        "beta": _DEFAULT_BETA if extra.get("beta") is None else extra["beta"],
        "eps": settings.eps if ring is None or not ring.tree.prioritized else ring.tree.eps,
    }
    instead = None  # a sampler that replaces the sampler that the class creates
    if issubclass(cls, Prioritized):
        arguments.update(priorities)
        instead = overrides.pop("sampler", None)
    elif prioritized and "sampler" not in overrides:
        priorities.update({name: overrides.pop(name) for name in priorities if name in overrides})
        arguments["sampler"] = PrioritizedSampler(
            settings.capacity,
            **priorities,
            reduction=extra.get("reduction") or "max",
            max_priority_within_buffer=bool(extra.get("max_priority_within_buffer")),
        )
    storage = _create_storage(engine, overrides)
    buffer = cls(storage=storage, **{**arguments, **overrides})
    if instead is not None:
        sampler = made(instead)
        # If there is a ring, `set_sampler` compares the values.
        if isinstance(sampler, PrioritizedSampler) and ring is None:
            _require_same(sampler, priorities, engine.where)
        buffer.set_sampler(sampler)
    return buffer


def _require_same(sampler: PrioritizedSampler, priorities: dict[str, Any], where: str) -> None:
    """Raises ValueError if a sampler has another alpha or eps than the directory.

    Args:
        sampler: the sampler.
        priorities: ``alpha`` and ``eps`` of the directory.
        where: path of the directory, for the message.
    """
    for name in ("alpha", "eps"):
        own, stored = getattr(sampler, name), priorities[name]
        if own != stored:
            raise ValueError(
                f"{where}: the stored priorities use {name}={stored!r}, but the sampler has "
                f"{name}={own!r}; create the sampler with {name}={stored!r}"
            )


def _create_storage(engine: Engine, overrides: dict[str, Any]) -> Storage:
    """Creates the storage for an open directory. Removes the storage's options from ``overrides``.

    Without records, the storage is a `LazyMemmapStorage`. With records, its class is recorded.
    """
    settings = engine.settings
    if not settings.record_bytes:
        device = overrides.pop("device", None)
        on_cpu = device is None or device == "auto"  # as in the constructor
        return LazyMemmapStorage.from_engine(engine, device="cpu" if on_cpu else device)
    kind = recorded.read_storage_settings(settings, engine.where).get("kind", "")
    # An unknown class is no problem, because each record contains its own layout.
    records = RecordList.kinds.get(kind, LazyStackStorage)
    options = {name: overrides.pop(name) for name in records.storage_options & overrides.keys()}
    return records.from_engine(engine, **options)
