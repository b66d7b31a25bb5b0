"""Compares the arguments of a coordinator with the settings recorded in its directory.

    fixed when the buffer is created   capacity, ndim, alpha, eps,     a different value is an error
                                       storage, max_bytes, share_next
    recorded, and can be changed       beta, batch_size, priority_key,
                                       weight_key, reduction, dim_extend,
                                       for records: stack_dim, compression_level, compress,
                                       dictionary_bytes
    local to a process, not recorded   sampler, sample_unit, transform, collate_fn, pin_memory,
                                       prefetch, generator, rank, prefault, device,
                                       for records: pad_output, compression_fn,
                                       decompression_fn

If an argument is omitted, the recorded value is used. If no value is recorded, the default is used.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

import numpy as np

from shmbuffer.items.indices import as_int
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.format.sharing import SharingRequest
from shmbuffer.memory.mapped.recorded import read_storage_settings
from shmbuffer.memory.mapped.settings import Reserve, require_reserve

PRIORITIZED, PLAIN = "TensorDictPrioritizedReplayBuffer", "TensorDictReplayBuffer"
PRIORITY_KEY = "td_error"

RECORDED = frozenset({"weight_key", "reduction", "dim_extend"})
LOCAL = frozenset(
    {"sampler", "sample_unit", "transform", "collate_fn", "pin_memory", "prefetch"}
    | {"generator", "rank", "device"}
)

STORAGES: Mapping[str, frozenset[str]] = {
    "LazyMemmapStorage": frozenset(),
    "LazyStackStorage": frozenset({"stack_dim"}),
    "CompressedListStorage": frozenset({"compression_level", "compress", "dictionary_bytes"}),
}
"""Names of the storage classes, each with its arguments that are recorded."""
OF_STORAGES = frozenset().union(*STORAGES.values())
LOCAL_OF_STORAGES = frozenset({"pad_output", "compression_fn", "decompression_fn"})
_ROWS = "LazyMemmapStorage"
_SHARING = frozenset({"share_next", "share_next_room"})


class Default(float):
    """A default value. Its type distinguishes it from an equal number that the caller passed."""


ALPHA = Default(0.6)
BETA = Default(0.4)
EPS = Default(1e-8)


@dataclass(frozen=True)
class BufferConfig:
    """Arguments of a ``Coordinator`` that concern the settings of its directory.

    See ``Coordinator`` for the arguments. The constructor raises ValueError if one is invalid.
    """

    capacity: int | None = None
    ndim: int | None = None
    alpha: float | None = ALPHA
    eps: float = EPS
    beta: float = BETA
    batch_size: int | None = None
    priority_key: str | tuple[str, ...] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)  # options named in ``RECORDED``
    storage: str | None = None
    max_bytes: int | None = None
    checksum: bool = True
    reserve: Reserve = "all"
    of_storage: Mapping[str, Any] = field(default_factory=dict)  # options named in ``OF_STORAGES``
    share_next: Any = False
    share_next_room: int | None = None

    def __post_init__(self) -> None:
        require_reserve(self.reserve)
        self._check_storage()
        if self._sharing is not None and self.storage not in (None, _ROWS):
            raise ValueError(f"storage={self.storage!r} does not support share_next")
        for name in ("capacity", "batch_size", "ndim", "max_bytes"):
            if getattr(self, name) is not None:
                count = as_int(name, getattr(self, name))
                if count < 1:
                    raise ValueError(f"{name} must be at least 1, got {count}")
                object.__setattr__(self, name, count)
        for name in ("alpha", "beta", "eps"):
            number = getattr(self, name)
            if number is not None and not 0 <= number < math.inf:
                raise ValueError(f"{name} must be a finite number of at least 0, got {number}")

    @property
    def _sharing(self) -> SharingRequest | None:
        """How next observations are to be shared; None if they are stored separately."""
        return SharingRequest.from_arguments(self.share_next, self.share_next_room, self.ndim or 1)

    def _check_storage(self) -> None:
        """Raises ValueError if the storage is unknown or does not support another argument."""
        if self.storage is not None and self.storage not in STORAGES:
            raise ValueError(f"storage must be one of {', '.join(STORAGES)}, got {self.storage!r}")
        kind = self.storage or _ROWS
        is_known = self.storage is not None or self.capacity is not None  # otherwise it is recorded
        if kind != _ROWS and (self.ndim or 1) > 1:
            raise ValueError(
                f"storage={kind!r} has one dimension, so ndim={self.ndim} is not supported"
            )
        is_there = self.capacity is None and self.max_bytes is None  # True: both are recorded
        if is_known and not is_there and (kind == _ROWS) != (self.max_bytes is None):
            raise ValueError(
                f"storage={kind!r} needs max_bytes, the size of its byte ring"
                if self.max_bytes is None
                else f"storage={kind!r} does not support max_bytes; for items of any size, use a "
                "LazyStackStorage or a CompressedListStorage"
            )
        foreign = sorted(self.of_storage.keys() - STORAGES[kind])
        if is_known and foreign:
            raise ValueError(f"storage={kind!r} does not support {foreign[0]}")

    def settings(self) -> Settings | None:
        """Returns the settings for a new directory, or None if no capacity was requested."""
        if self.capacity is None:
            return None
        return Settings(
            capacity=self.capacity,
            ndim=self.ndim or 1,
            checksum=self.checksum,
            reserve=self.reserve,
            alpha=None if self.alpha is None else float(self.alpha),
            eps=float(self.eps),
            record_bytes=self.max_bytes or 0,
            extra={
                "buffer": PLAIN if self.alpha is None else PRIORITIZED,
                "beta": float(self.beta),
                "batch_size": None,
                "priority_key": PRIORITY_KEY,
                **({"storage": {"kind": self.storage}} if self.max_bytes else {}),
                **self._to_be_recorded(),
                **({} if self._sharing is None else {"share_next": self._sharing.to_json()}),
            },
        )

    def agree(self, engine: Engine) -> None:
        """Compares the arguments with the recorded settings, and records requested changes.

        Raises ValueError if an argument differs from a recorded value that cannot be changed.
        """
        recorded, ring = engine.settings, engine.ring()
        # A prioritized ring has the current exponent, which may have changed since its recording.
        there = ring.tree if ring is not None and ring.tree.prioritized else recorded
        kind = read_storage_settings(recorded, engine.where).get("kind", _ROWS)
        asked_bytes = None
        if self.max_bytes is not None:  # `Settings` rounds the size up to whole pages
            asked_bytes = Settings(capacity=1, record_bytes=self.max_bytes).record_bytes
        fixed = {
            "storage": (self.storage, kind),
            "max_bytes": (asked_bytes, recorded.record_bytes),
            "capacity": (self.capacity, recorded.capacity),
            "ndim": (self.ndim, recorded.ndim),
            "alpha": (self.alpha, there.alpha),
            "eps": (self.eps, there.eps),
            "share_next": (
                None if self._sharing is None else self._sharing.to_json(),
                recorded.extra.get("share_next"),
            ),
        }
        for name, (value, fact) in fixed.items():
            is_requested = not isinstance(value, Default) and (value is not None or name == "alpha")
            if is_requested and value != fact:
                raise ValueError(
                    f"{engine.path}: the buffer in this directory has {name}={fact!r}, but "
                    f"{value!r} was requested; omit {name} to keep the value, or pass "
                    "on_existing='overwrite' to replace the buffer"
                )
        if foreign := sorted(self.of_storage.keys() - STORAGES.get(kind, OF_STORAGES)):
            raise ValueError(
                f"{engine.path}: the buffer in this directory has a {kind}, which does not support "
                f"{foreign[0]}"
            )
        changes = {
            name: value
            for name, value in self._to_be_recorded(recorded.extra.get("storage")).items()
            if value != recorded.extra.get(name)
        }
        if changes:
            engine.update_settings(extra={**recorded.extra, **changes})

    def _to_be_recorded(self, storage: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the requested values of settings that can be changed, in JSON types.

        Args:
            storage: recorded settings of the storage, if the buffer exists.
        """
        kind = {"kind": self.storage} if storage is None else storage
        of_storage = {name: _as_json(value) for name, value in self.of_storage.items()}
        requested = {
            "storage": {**kind, **of_storage} if of_storage else None,
            "beta": None if isinstance(self.beta, Default) else float(self.beta),
            "batch_size": self.batch_size,
            "priority_key": self.priority_key,
            **self.more,
        }
        return {name: _as_json(value) for name, value in requested.items() if value is not None}


def split(options: dict[str, Any], own: Collection[str]) -> dict[str, Any]:
    """Moves the options that are recorded out of ``options``, for the caller's `BufferConfig`.

    Args:
        options: further arguments of the coordinator. Those for this process alone remain.
        own: names of the coordinator's other arguments, for the message.

    Returns:
        Arguments of `BufferConfig`.

    Raises:
        TypeError: an option is unknown.
    """
    more = {name: options.pop(name) for name in RECORDED & options.keys()}
    of_storage = {name: options.pop(name) for name in OF_STORAGES & options.keys()}
    sharing = {name: options.pop(name) for name in _SHARING & options.keys()}
    if unknown := sorted(options.keys() - LOCAL - LOCAL_OF_STORAGES):
        names = {one.name for one in fields(BufferConfig)} - {"more", "of_storage"}
        names |= {*own, *RECORDED, *LOCAL, *OF_STORAGES, *LOCAL_OF_STORAGES}
        similar = get_close_matches(unknown[0], sorted(names), n=1, cutoff=0.75)
        hint = f"did you mean {similar[0]}?" if similar else "check the name."
        raise TypeError(
            f"Coordinator() got an unexpected argument {unknown[0]!r}; {hint} The arguments "
            f"are {', '.join(sorted(names))}; pass other arguments of the buffer's class to "
            "attach()"
        )
    return {"more": more, "of_storage": of_storage, **sharing}


def _as_json(value: Any) -> Any:
    """Converts nested tuples to lists, and NumPy scalars to Python numbers."""
    if isinstance(value, np.generic):
        return value.item()
    return [_as_json(one) for one in value] if isinstance(value, (tuple, list)) else value
