"""What a buffer says of itself in its directory, so that ``attach`` makes the same again."""

from __future__ import annotations

from typing import Any

from shmbuffer.replay.samplers import PrioritizedSampler
from shmbuffer.replay.writers import RoundRobinWriter


def record(buffer: Any) -> None:
    """Say in the buffer's directory what kind of buffer it is.

    What is recorded already is left as it is.

    Cost: nothing where the storage is not in a directory; else a file lock, once.
    """
    engine = buffer.storage.open_engine
    if engine is None or not engine.shared:
        return
    settings = engine.settings
    changes: dict[str, Any] = {}
    if "buffer" not in settings.extra:
        changes["extra"] = _describe(buffer)
    sampler = buffer.sampler
    if settings.alpha is None and isinstance(sampler, PrioritizedSampler):
        changes.update(alpha=sampler.alpha, eps=sampler.eps)
    if changes:
        engine.update_settings(**changes)


def _describe(buffer: Any) -> dict[str, Any]:
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
