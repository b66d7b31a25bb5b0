"""Records a buffer's class and options in its directory, so that ``attach`` can use them."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

from shmbuffer.memory import Settings
from shmbuffer.samplers.priority.prioritized import PrioritizedSampler
from shmbuffer.storages.ring_backed import RingBacked
from shmbuffer.writers.round_robin import RoundRobinWriter


def describe(parts: Any) -> None:
    """Records the class and the options of a buffer in its directory.

    Does nothing if the directory already contains a record. If the directory does not exist yet,
    the storage records them when it creates the directory.

    Args:
        parts: the `Parts` of the buffer.
    """
    storage, engine = parts.storage, parts.storage.open_engine
    if isinstance(storage, RingBacked):
        known = weakref.ref(parts)
        storage.described = lambda settings: _described(known(), settings)
    if engine is None or not engine.shared:
        return
    found = engine.settings
    wanted = _described(parts, found)
    if wanted != found:
        engine.update_settings(alpha=wanted.alpha, eps=wanted.eps, extra=wanted.extra)


def _described(parts: Any, settings: Settings) -> Settings:
    """Adds the class and the options of a buffer, and its alpha and eps, to settings.

    Values that are already recorded are kept. If the buffer no longer exists, ``parts`` is None and
    the settings are returned unchanged.
    """
    if parts is None:
        return settings
    if "buffer" not in settings.extra:
        settings = replace(settings, extra={**settings.extra, **_content(parts)})
    sampler = parts.sampler
    if settings.alpha is None and isinstance(sampler, PrioritizedSampler):
        settings = replace(settings, alpha=sampler.alpha, eps=sampler.eps)
    return settings


def _content(parts: Any) -> dict[str, Any]:
    sampler, writer = parts.sampler, parts.writer
    return {
        "buffer": parts.family,
        "batch_size": parts.batch_size,
        "dim_extend": parts.dim_given,
        "weight_key": parts.weight_key,
        "priority_key": parts.priority_key,
        "reduction": getattr(sampler, "reduction", None),
        "max_priority_within_buffer": getattr(sampler, "max_priority_within_buffer", None),
        "beta": sampler.beta if isinstance(sampler, PrioritizedSampler) else None,
        "track_generations": isinstance(writer, RoundRobinWriter) and writer.track_generations,
    }
