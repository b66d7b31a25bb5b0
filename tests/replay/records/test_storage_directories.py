"""Where records are stored, who may open them, and what remains after all clients were killed."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    CompressedListStorage,
    LazyStackStorage,
    SpaceError,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    attach,
)
from tests.replay.records.items import KINDS, is_item, item, items, shared

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


# -- the table -------------------------------------------------------------------------------------


@every_kind
def test_too_little_space_leaves_nothing_behind(kind: type[Any], tmp_path: Path) -> None:
    storage = kind(20, scratch_dir=tmp_path / "huge", max_bytes=2**45)
    with pytest.raises(SpaceError, match="bytes"):
        storage.set(0, item(0))
    assert not (tmp_path / "huge").exists()
    with pytest.raises(SpaceError):
        shared(kind, tmp_path / "huge", max_bytes=2**45)
    assert not (tmp_path / "huge").exists()


def test_a_private_list_names_what_makes_it_shared() -> None:
    for kind in KINDS:
        storage = kind(10)
        assert not storage.shared
        assert storage.scratch_dir is None
        storage.set(0, TensorDict({"a": torch.zeros(2)}))
        with pytest.raises(RuntimeError, match="max_bytes, a scratch_dir and shared_init=True"):
            pickle.dumps(storage)
        with pytest.raises(RuntimeError, match="holds objects of this process"):
            storage.engine()


@every_kind
def test_before_its_directory_is_made_a_storage_stays_here(kind: type[Any], tmp_path: Path) -> None:
    storage = kind(10, scratch_dir=tmp_path / "buffer", max_bytes=2**16)
    with pytest.raises(RuntimeError, match="unless it is created with shared_init=True"):
        pickle.dumps(storage)
    pid = os.fork()
    if not pid:
        try:
            storage.set(0, item(0))
        except RuntimeError as error:
            os._exit(0 if "this process is the child of a fork" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# -- attach ----------------------------------------------------------------------------------------


def test_attach_makes_the_storage_that_was_recorded(tmp_path: Path) -> None:
    made = shared(
        CompressedListStorage,
        tmp_path / "compressed",
        compression_level=7,
        compress=["tokens", ("deep", "image")],
    )
    TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=made, batch_size=9)
    rb: Any = attach(tmp_path / "compressed", pad_output=-1, transform=lambda data: data)
    assert type(rb) is TensorDictPrioritizedReplayBuffer
    assert (rb.batch_size, rb.sampler.alpha, rb.sampler.beta) == (9, 0.7, 0.5)
    storage = rb.storage
    assert type(storage) is CompressedListStorage
    assert (storage.max_size, storage.max_bytes, storage.compression_level) == (100, 2**20, 7)
    assert storage._recorded_arguments() == made._recorded_arguments()
    assert storage._recorded_arguments()["compress"] == ["tokens", ("deep", "image")]
    rb.extend(items(0, 2))
    assert rb[:]["mask"].shape == (2, 2)
    assert repr(storage).startswith("CompressedListStorage(max_size=100, max_bytes=1048576, len=2,")
    stack = shared(LazyStackStorage, tmp_path / "stack", stack_dim=1)
    stack.set(range(2), [TensorDict(a=torch.zeros(n), batch_size=[n]) for n in (2, 2)])
    other: Any = attach(tmp_path / "stack")
    assert type(other.storage) is LazyStackStorage
    assert other[:].batch_size == (2, 2)
    assert other[:].stack_dim == 1
    for one in (rb, made, stack, other):
        one.close()


# -- processes -------------------------------------------------------------------------------------


@pytest.mark.product(few=1)
@every_kind
def test_threads_of_one_handle_read_write_and_change_at_once(
    kind: type[Any], tmp_path: Path
) -> None:
    rb = TensorDictReplayBuffer(
        storage=shared(kind, tmp_path / "buffer", max_size=40, max_bytes=2**15), batch_size=8
    )
    rb.extend(items(0, 8))
    stop, wrong = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            wrong.extend(one for one in rb.sample().unbind(0) if not is_item(one))

    def change() -> None:
        while not stop.is_set():
            sample = rb.sample()
            rb.update_if_present(
                index=sample["index"],
                generation=sample["index_generation"],
                patch={"text": [f"number {int(one['id'])}" for one in sample.unbind(0)]},
            )

    threads = [threading.Thread(target=work) for work in (read, read, change)]
    for thread in threads:
        thread.start()
    for start in range(8, 400, 5):
        rb.extend(items(start, start + 5))
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert rb.write_count == 8 + 5 * len(range(8, 400, 5))
    rb.close()
