"""TorchRL's own loggers accept a buffer's counters."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.compat.family import ours
from tests.watch.test_loggers import read_back

loggers = pytest.importorskip("torchrl.record.loggers")


@pytest.fixture
def rb() -> Any:
    made = ours.TensorDictReplayBuffer(storage=ours.LazyMemmapStorage(100), batch_size=4)
    made.extend(TensorDict({"obs": torch.rand(10, 3)}, [10]))
    return made


def rows_of(file: Path) -> list[list[float]]:
    return [list(map(float, row)) for row in csv.reader(file.read_text().splitlines())]


def test_a_csv_logger_has_a_file_for_each_number(tmp_path: Path, rb: Any) -> None:
    logger = loggers.CSVLogger("run", log_dir=str(tmp_path))
    ours.log_stats(logger, rb.stats(), 1)
    rb.sample()
    stats = rb.stats()
    ours.log_stats(logger, stats, 2)
    logger.close()
    root = tmp_path / "run" / "scalars" / "buffer"
    assert {file.stem for file in root.iterdir()} == stats.keys()
    assert rows_of(root / "batches_sampled.csv") == [[1.0, 0.0], [2.0, 1.0]]


def test_a_tensorboard_logger_has_each_number(tmp_path: Path, rb: Any) -> None:
    pytest.importorskip("tensorboard")
    logger = loggers.TensorboardLogger("run", log_dir=str(tmp_path))
    stats = rb.stats()
    ours.log_stats(logger, stats, 3)
    logger.close()
    found = read_back(Path(logger.log_dir))
    assert found.keys() == {f"buffer/{name}" for name in stats}
    assert found["buffer/size"] == (3, 10.0)


def test_without_the_function_a_loop_does_it(tmp_path: Path, rb: Any) -> None:
    logger = loggers.CSVLogger("run", log_dir=str(tmp_path))
    for name, value in rb.stats().items():
        logger.log_scalar(name, value, step=1)
    logger.log_metrics(rb.stats(), step=2)
    logger.close()
    assert rows_of(tmp_path / "run" / "scalars" / "size.csv") == [[1.0, 10.0], [2.0, 10.0]]
