"""Ctrl-C in a save or a load, at every point where CPython checks for signals."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import LazyMemmapStorage, TensorDictReplayBuffer
from tests.crash.interrupts import Deed, walk
from tests.kit.rings import engine_of


# A file object that is interrupted between its opening and its `with` warns when it is closed.
@pytest.mark.product(few=1)
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <_io.FileIO:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("call", ["dumps", "loads"])
def test_an_interrupt_anywhere_in_it_leaves_no_lock_and_no_file(
    call: str, fast_path: Path, full: bool
) -> None:
    numbers = itertools.count()

    @contextmanager
    def begin() -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
        path = fast_path / str(next(numbers))
        storage = LazyMemmapStorage(8, scratch_dir=path / "buffer", shared_init=True)
        rb = TensorDictReplayBuffer(storage=storage, batch_size=4)
        rb.extend(TensorDict({"obs": torch.arange(5.0)}, [5]))
        rb.dumps(path / "save")

        def act() -> None:
            getattr(rb, call)(path / "save")

        def works() -> None:
            act()
            rb.loads(path / "save")
            assert rb[:]["obs"].tolist() == [0, 1, 2, 3, 4]
            engine_of(storage).cleanup()
            rb.close()

        yield act, works

    with begin() as (act, works):  # creates caches that are made once, such as those of torch
        act()
        works()
    del act, works
    gc.collect()
    assert walk(Deed(call, begin), stride=12 if full else 36, all_of="locks.py") > 15
