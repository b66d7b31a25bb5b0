"""What a coordinator was asked for, beside what its directory says already.

    fixed when the buffer is created   capacity, ndim, alpha, eps      another wish is an error
    recorded, and may be changed       beta, batch_size, priority_key,
                                       weight_key, reduction, dim_extend
    of one process, never recorded     transform, collate_fn, pin_memory, prefetch, generator

What the caller left out is no wish: the record counts, and in a new directory the default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shmbuffer.memory import Engine, Settings

PRIORITIZED, PLAIN = "TensorDictPrioritizedReplayBuffer", "TensorDictReplayBuffer"
PRIORITY_KEY = "td_error"

RECORDED = frozenset({"weight_key", "reduction", "dim_extend"})
LOCAL = frozenset({"transform", "collate_fn", "pin_memory", "prefetch", "generator"})


class Default(float):
    """A default that can be told from the same number given by the caller."""


ALPHA, BETA, EPS = Default(0.6), Default(0.4), Default(1e-8)


@dataclass(frozen=True)
class Wishes:
    """The arguments of a coordinator that concern its directory; see ``Coordinator``.

    Attributes:
        more: those of ``RECORDED``.

    Raises:
        ValueError: one of them makes no sense.
    """

    capacity: int | None = None
    ndim: int | None = None
    alpha: float | None = ALPHA
    eps: float = EPS
    beta: float = BETA
    batch_size: int | None = None
    priority_key: str | tuple[str, ...] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("capacity", "batch_size", "ndim"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{name} is at least 1, not {count}")
        for name in ("alpha", "beta", "eps"):
            number = getattr(self, name)
            if number is not None and not 0 <= number < math.inf:
                raise ValueError(f"{name} is a finite number, 0 or more, not {number}")

    def settings(self, *, checksum: bool, reserve: bool) -> Settings | None:
        """Returns what to record in a new directory; None without a capacity to create one."""
        if self.capacity is None:
            return None
        usual = {"beta": float(self.beta), "batch_size": None, "priority_key": PRIORITY_KEY}
        return Settings(
            capacity=self.capacity,
            ndim=self.ndim or 1,
            checksum=checksum,
            reserve=reserve,
            alpha=None if self.alpha is None else float(self.alpha),
            eps=float(self.eps),
            extra={
                "buffer": PLAIN if self.alpha is None else PRIORITIZED,
                **usual,
                **self._to_be_recorded(),
            },
        )

    def agree(self, engine: Engine) -> None:
        """Compares with what is recorded, and records the wishes that may change it.

        Raises:
            ValueError: the buffer was made with another capacity, ndim, alpha or eps.
        """
        recorded, ring = engine.settings, engine.ring
        # The exponent may have been changed since it was recorded.
        there = ring if ring is not None and ring.prioritized else recorded
        fixed = {
            "capacity": (self.capacity, recorded.capacity),
            "ndim": (self.ndim, recorded.ndim),
            "alpha": (self.alpha, there.alpha),
            "eps": (self.eps, there.eps),
        }
        for name, (wish, fact) in fixed.items():
            is_wish = not isinstance(wish, Default) and (wish is not None or name == "alpha")
            if is_wish and wish != fact:
                raise ValueError(
                    f"{engine.path}: the buffer there has {name}={fact!r}, not {wish!r}; leave it "
                    "out to take what is there, or start anew with on_existing='overwrite'"
                )
        changes = {
            name: wish
            for name, wish in self._to_be_recorded().items()
            if wish != recorded.extra.get(name)
        }
        if changes:
            engine.update_settings(extra={**recorded.extra, **changes})

    def _to_be_recorded(self) -> dict[str, Any]:
        """The wishes that may change the record, as JSON has them: it knows no tuples."""
        wishes = {
            "beta": None if isinstance(self.beta, Default) else float(self.beta),
            "batch_size": self.batch_size,
            "priority_key": self.priority_key,
            **self.more,
        }
        return {
            name: list(wish) if isinstance(wish, tuple) else wish
            for name, wish in wishes.items()
            if wish is not None
        }
