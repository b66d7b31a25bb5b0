"""Logs the statistics of a buffer with the logger of a training script.

    stats() ──flat dict──▶ log_stats ──▶ log_metrics(dict, step=)         TorchRL, Lightning, MLflow
                                     ──▶ log_scalar(name, value, step=)   older loggers of TorchRL
                                     ──▶ add_scalar(name, value, step)    TensorBoard
                                     ──▶ log(dict, step=)                 wandb

`log_stats` calls the first of these methods that the logger has. It imports none of the packages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shmbuffer.watch.stats import Number


def log_stats(
    logger: Any, stats: Mapping[str, Number], step: int | None, prefix: str = "buffer/"
) -> None:
    """Logs each number that ``stats()`` of a buffer or coordinator returns, under its name.

        log_stats(logger, rb.stats(), step)

    Args:
        logger: a TorchRL logger, a ``torch.utils.tensorboard.SummaryWriter``, a wandb run, or any
            other object with a method ``log_metrics``, ``log_scalar``, ``add_scalar`` or ``log``.
        stats: mapping from names to numbers. False and True are logged as 0 and 1.
        step: training step, or None if the logger counts the steps itself.
        prefix: prepended to every name.

    Raises:
        TypeError: the logger has none of these methods, or a value is not a number. Nothing was
            logged.

    Cost: only the time of the logger's own calls.
    """
    values = {f"{prefix}{name}": _number(name, value) for name, value in stats.items()}
    if _has(logger, "log_metrics"):
        logger.log_metrics(values, step=step)
    elif _has(logger, "log_scalar"):
        for name, value in values.items():
            logger.log_scalar(name, value, step=step)
    elif _has(logger, "add_scalar"):
        for name, value in values.items():
            logger.add_scalar(name, value, step)
    elif _has(logger, "log"):
        logger.log(values, step=step)
    else:
        raise TypeError(
            f"{type(logger).__name__} is not a supported logger: it has none of the methods "
            "log_metrics, log_scalar, add_scalar and log. Log the items of stats() one by one "
            "instead"
        )


def _has(logger: Any, name: str) -> bool:
    return callable(getattr(logger, name, None))


def _number(name: str, value: object) -> Number:
    if isinstance(value, bool):
        return int(value)
    if not isinstance(value, (int, float)):
        raise TypeError(f"{name!r} is {value!r}, which is not a number. Nothing was logged")
    return value
