"""The description of a buffer in its directory, from which ``attach`` makes the same one."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

from shmbuffer.memory import Settings
from shmbuffer.samplers import PrioritizedSampler
from shmbuffer.storages.ring_backed import RingBacked
from shmbuffer.writers import RoundRobinWriter


def describe(buffer: Any) -> None:
    """Write the kind of the buffer into its directory, if any, unless it is there already."""
    storage, engine = buffer.storage, buffer.storage.open_engine
    if isinstance(storage, RingBacked):
        known = weakref.ref(buffer)
        storage.described = lambda settings: _described(known(), settings)
    if engine is None or not engine.shared:
        return
    found = engine.settings
    wanted = _described(buffer, found)
    if wanted != found:
        engine.update_settings(alpha=wanted.alpha, eps=wanted.eps, extra=wanted.extra)


def _described(buffer: Any, settings: Settings) -> Settings:
    """The settings with the description of a buffer, unless that is gone."""
    if buffer is None:
        return settings
    if "buffer" not in settings.extra:
        settings = replace(settings, extra={**settings.extra, **_content(buffer)})
    sampler = buffer.sampler
    if settings.alpha is None and isinstance(sampler, PrioritizedSampler):
        settings = replace(settings, alpha=sampler.alpha, eps=sampler.eps)
    return settings


def _content(buffer: Any) -> dict[str, Any]:
    sampler, writer = buffer.sampler, buffer.writer
    return {
        "buffer": buffer.family,
        "batch_size": buffer.batch_size,
        "dim_extend": buffer._dim_extend,
        "weight_key": buffer._weight_key,
        "priority_key": getattr(buffer, "priority_key", None),
        "reduction": getattr(sampler, "reduction", None),
        "max_priority_within_buffer": getattr(sampler, "max_priority_within_buffer", None),
        "beta": sampler.beta if isinstance(sampler, PrioritizedSampler) else None,
        "track_generations": isinstance(writer, RoundRobinWriter) and writer.track_generations,
    }
