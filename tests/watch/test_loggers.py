"""The counters of a buffer go into the training script's logger under their own names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    Coordinator,
    LazyMemmapStorage,
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictPrioritizedReplayBuffer,
    attach,
    log_stats,
)


def filled(path: Path | None = None) -> Any:
    storage = LazyMemmapStorage(100, scratch_dir=path)
    rb = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=storage, batch_size=4)
    rb.extend(TensorDict({"obs": torch.rand(10, 3)}, [10]))
    rb.sample()
    return rb


def ensemble() -> Any:
    return ReplayBufferEnsemble(filled(), filled(), batch_size=4)


def of_list() -> Any:
    rb = ReplayBuffer(storage=ListStorage(10), batch_size=2)
    rb.extend([1, 2, 3])
    return rb


@pytest.mark.parametrize(
    "make",
    [filled, ensemble, of_list, lambda: ReplayBuffer(storage=LazyMemmapStorage(10))],
    ids=["buffer", "ensemble", "list", "empty"],
)
def test_the_stats_of_a_buffer_are_flat_names_and_plain_numbers(make: Callable[[], Any]) -> None:
    stats = make().stats()
    assert {"size", "capacity", "write_count", "utilization", "initialized"} <= stats.keys()
    assert {type(name) for name in stats} == {str}
    assert {type(value) for value in stats.values()} <= {int, float, bool}


def test_the_stats_of_a_coordinator_and_a_client_are_plain_numbers(tmp_path: Path) -> None:
    with (
        Coordinator(tmp_path / "buffer", capacity=10, batch_size=2) as coordinator,
        attach(tmp_path / "buffer") as rb,
    ):
        rb.extend(TensorDict({"obs": torch.rand(5, 3)}, [5]))
        for stats in (coordinator.stats(), rb.stats()):
            assert {type(value) for value in stats.values()} <= {int, float, bool}
            assert stats["size"] == 5


def read_back(directory: Path) -> dict[str, tuple[int, float]]:
    """Returns the step and value of the last scalar of each name in the event files."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(directory)).Reload()
    last = {tag: events.Scalars(tag)[-1] for tag in events.Tags()["scalars"]}
    return {tag: (one.step, one.value) for tag, one in last.items()}


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "events")) as made:
        yield made


def test_tensorboard_has_every_number_at_its_step(writer: Any) -> None:
    rb = filled()
    log_stats(writer, rb.stats(), 1)
    rb.sample()
    stats = rb.stats()
    log_stats(writer, stats, 2)
    writer.flush()
    found = read_back(Path(writer.log_dir))
    assert found.keys() == {f"buffer/{name}" for name in stats}
    assert found["buffer/size"] == (2, 10.0)
    assert found["buffer/batches_sampled"] == (2, 2.0)
    assert found["buffer/initialized"] == (2, 1.0)
    for name, value in stats.items():
        assert found[f"buffer/{name}"] == (2, pytest.approx(float(value), rel=1e-6))


def test_a_coordinator_s_rates_are_there_too(writer: Any, tmp_path: Path) -> None:
    with Coordinator(tmp_path / "buffer", capacity=10, batch_size=2) as coordinator:
        coordinator.buffer.extend(TensorDict({"obs": torch.rand(5, 3)}, [5]))
        log_stats(writer, coordinator.stats(), 7, prefix="replay/")
    writer.flush()
    found = read_back(Path(writer.log_dir))
    assert found["replay/inserts_per_s"][1] > 0
    assert found["replay/clients_alive"] == (7, 1.0)


def test_without_the_function_a_loop_does_it(writer: Any) -> None:
    stats = filled().stats()
    for name, value in stats.items():
        writer.add_scalar(name, value, 3)
    writer.flush()
    assert read_back(Path(writer.log_dir))["capacity"] == (3, 100.0)


class Run:
    """A stand-in for the result of wandb.init(), with one call for each step."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int | None]] = []

    def log(self, data: dict[str, float], step: int | None = None) -> None:
        self.logged.append((data, step))


class Metrics(Run):
    """A logger of TorchRL or Lightning: takes all values at once, or one at a time."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append((metrics, step))

    def log_scalar(self, name: str, value: float, step: int | None = None) -> None:
        raise AssertionError("a call for each number, where one is enough")


class Scalars:
    """A logger of TorchRL before `log_metrics`."""

    def __init__(self) -> None:
        self.logged: list[tuple[str, float, int | None]] = []

    def log_scalar(self, name: str, value: float, step: int | None = None) -> None:
        self.logged.append((name, value, step))


@pytest.mark.parametrize("make", [Run, Metrics])
def test_a_logger_that_takes_a_dict_gets_one(make: type[Run]) -> None:
    logger = make()
    log_stats(logger, {"size": 3, "initialized": True}, 5)
    assert logger.logged == [({"buffer/size": 3, "buffer/initialized": 1}, 5)]
    assert type(logger.logged[0][0]["buffer/initialized"]) is int


def test_a_logger_that_takes_numbers_gets_each(tmp_path: Path) -> None:
    logger = Scalars()
    log_stats(logger, {"size": 3, "fill": 0.5}, None, prefix="")
    assert logger.logged == [("size", 3, None), ("fill", 0.5, None)]


@pytest.mark.parametrize("logger", [None, print, "run", {"log": 3}])
def test_an_object_without_a_logging_method_is_refused(logger: object) -> None:
    with pytest.raises(
        TypeError, match=r"\w+ is not a supported logger: it has none of the methods log_"
    ):
        log_stats(logger, {"size": 3}, 1)


def test_a_value_that_is_not_a_number_is_refused_before_anything_is_logged() -> None:
    logger = Scalars()
    with pytest.raises(
        TypeError, match=r"'name' is 'x', which is not a number. Nothing was logged"
    ):
        log_stats(logger, {"size": 3, "name": "x"}, 1)  # type: ignore[dict-item]
    assert logger.logged == []
