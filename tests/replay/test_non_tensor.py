"""Text and other objects beside tensors: stored in private storages and refused by shared ones."""

from __future__ import annotations

import os
import pickle
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack

from shmbuffer import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SchemaMismatchError,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from tests.kit.items import Step


def items(*texts: Any, start: int = 0) -> TensorDict:
    n = len(texts)
    return TensorDict(
        {"a": torch.arange(start, start + n), "n": {"text": NonTensorStack(*texts)}}, [n]
    )


def rb_of(*texts: Any, size: int = 10, **options: Any) -> ReplayBuffer:
    rb = ReplayBuffer(storage=LazyTensorStorage(size, **options), batch_size=20)
    rb.extend(items(*texts))
    return rb


TEXT = ("n", "text")


def test_a_sample_brings_the_text_of_its_items() -> None:
    rb = rb_of("w", "x", "y", "z")
    sample = rb.sample()
    assert sample.batch_size == torch.Size([20])
    assert sample[TEXT] == ["wxyz"[at] for at in sample["a"]]
    assert isinstance(sample.get(TEXT), NonTensorStack)
    assert sample.get(TEXT).batch_size == torch.Size([20])


def test_text_is_indexed_like_the_tensors_next_to_it() -> None:
    rb = rb_of("w", "x", "y", "z")
    assert rb[:][TEXT] == ["w", "x", "y", "z"]
    assert rb[2][TEXT] == "y"
    assert isinstance(rb[2].get(TEXT), NonTensorData)
    assert rb[1:3][TEXT] == ["x", "y"]
    assert rb[[3, 0, 3]][TEXT] == ["z", "w", "z"]
    assert rb[torch.tensor([True, False, False, True])][TEXT] == ["w", "z"]
    assert rb[torch.tensor([[0, 1], [2, 3]])][TEXT] == [["w", "x"], ["y", "z"]]
    assert rb[4:].batch_size == torch.Size([0])
    assert rb["n"][:2]["text"] == ["w", "x"]
    assert rb[TEXT] == ["w", "x", "y", "z"]


def test_items_are_added_one_by_one() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(3), batch_size=3)
    for at, text in enumerate(("first", "second", "third", "fourth")):
        assert rb.add(TensorDict(a=torch.zeros(2), text=text)) == at % 3
    assert rb[:]["text"] == ["fourth", "second", "third"]


def test_the_ring_goes_round_with_the_text() -> None:
    rb = rb_of("a", "b", "c", size=4)
    rb.extend(items("d", "e", start=3))
    assert rb[:]["a"].tolist() == [4, 1, 2, 3]
    assert rb[:][TEXT] == ["e", "b", "c", "d"]
    rb.extend(items(*"fghijk", start=5))
    assert rb[:][TEXT] == ["i", "j", "k", "h"]
    assert rb[:]["a"].tolist() == [8, 9, 10, 7]


@pytest.mark.parametrize(
    "thing",
    [{"k": [1, 2]}, [1, [2]], (1, 2), None, object(), torch.zeros(3), TensorDict(x=1), {1, 2}],
    ids=lambda thing: type(thing).__name__,
)
def test_any_object_is_kept_as_it_is(thing: Any) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
    entry = NonTensorStack(NonTensorData(data=thing), NonTensorData(data=thing))
    rb.extend(TensorDict({"a": torch.zeros(2), "x": entry}, [2]))
    assert rb[1].get("x").data is thing
    assert [one.data is thing for one in rb[:].get("x").tensordicts] == [True, True]


def test_one_object_for_a_whole_batch_is_everybodys() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
    rb.extend(TensorDict({"a": torch.zeros(3), "text": NonTensorData("same", batch_size=[3])}, [3]))
    assert rb[:]["text"] == ["same"] * 3
    rb.extend(TensorDict({"a": torch.zeros(1), "text": ["other"]}, [1]))
    assert rb[:]["text"] == ["same"] * 3 + ["other"]


def test_lists_of_tensordicts_and_lazy_stacks_bring_text() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    several = [TensorDict(a=torch.tensor(i), text=str(i)) for i in range(3)]
    rb.extend(several)
    rb.extend(lazy_stack(several))
    assert rb[:]["text"] == ["0", "1", "2"] * 2
    assert rb[:]["a"].tolist() == [0, 1, 2] * 2


def test_an_item_with_dimensions_of_its_own_has_an_object_for_each_place() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=5)
    words = NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d"))
    rb.extend(TensorDict({"x": torch.arange(4).reshape(2, 2), "w": words}, [2, 2]))
    assert rb[:]["w"] == [["a", "b"], ["c", "d"]]
    assert rb[1]["w"] == ["c", "d"]
    assert rb.sample()["w"][0] in (["a", "b"], ["c", "d"])
    with pytest.raises(SchemaMismatchError, match=r"leaf 'w' is object\[1, 2\]"):
        rb.extend(
            TensorDict(
                {"x": torch.zeros(1, 2, dtype=torch.int64), "w": NonTensorStack("a")},
                batch_size=[1],
            )
        )


def test_lanes_have_text_too() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), batch_size=30)
    words = NonTensorStack(*(NonTensorStack(f"{i}0", f"{i}1", f"{i}2") for i in range(2)))
    rb.extend(TensorDict({"a": torch.arange(6).reshape(2, 3), "w": words}, [2, 3]))
    assert len(rb) == 6
    assert rb[:]["w"] == [["00", "01", "02"], ["10", "11", "12"]]
    assert rb[:, 1]["w"] == ["01", "11"]
    sample = rb.sample()
    assert sample["w"] == [f"{a // 3}{a % 3}" for a in sample["a"].tolist()]


def test_a_tensorclass_keeps_its_text() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=5)
    rb.extend(Step(obs=torch.arange(3), text="t", batch_size=[3]))
    rb.add(Step(obs=torch.tensor(3), text="u"))
    assert type(rb[:]) is Step
    assert list(rb[:].text) == ["t", "t", "t", "u"]
    assert rb[3].text == "u"
    sample = rb.sample()
    assert [text == "u" for text in sample.text] == (sample.obs == 3).tolist()


def test_objects_in_a_tensordict_within_a_pytree_are_kept() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=5)
    rb.extend((torch.arange(2), TensorDict({"t": NonTensorStack("x", "y")}, [2])))
    numbers, td = rb[:]
    assert numbers.tolist() == [0, 1]
    assert td["t"] == ["x", "y"]


def test_items_that_are_only_text_are_items() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=5)
    rb.extend(TensorDict({"t": NonTensorStack("x", "y", "z")}, [3]))
    sample = rb.sample()
    assert sample["t"] == ["xyz"[at] for at in sample["index"]]


# -- buffers of TensorDicts ------------------------------------------------------------------------


def test_a_tensordict_buffer_adds_index_and_weights() -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(10), batch_size=8
    )
    rb.extend(items("w", "x", "y").set("td_error", torch.tensor([0.0, 2.0, 0.0])))
    sample = rb.sample()
    assert sample[TEXT] == ["x"] * 8
    assert sample["index"].tolist() == [1] * 8
    assert sample["_weight"].tolist() == [1.0] * 8
    sample["td_error"] = torch.full((8,), 0.0)
    rb.update_tensordict_priority(sample)
    rb.update_priority(2, 1.0)
    again = rb.sample()
    assert again[TEXT] == ["y"] * 8
    rb.extend(again)  # a sample can be written as it is
    assert rb[3][TEXT] == "y"


@pytest.mark.parametrize("wrong", [float("nan"), -1.0, float("inf"), 1e300])
def test_an_invalid_priority_changes_nothing(wrong: float) -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=LazyTensorStorage(4), batch_size=8
    )
    rb.extend(items("w", "x", "y", "z").set("td_error", torch.ones(4, dtype=torch.float64)))
    priority = torch.tensor([1.0, wrong], dtype=torch.float64)
    with pytest.raises(ValueError, match="at position 1 is not a number from 0"):
        rb.extend(items("new", "newer").set("td_error", priority))
    assert rb[:][TEXT] == ["w", "x", "y", "z"]
    assert rb.write_count == 4
    good = items("next").set("td_error", torch.ones(1, dtype=torch.float64))
    assert rb.extend(good).tolist() == [0]


def test_priorities_are_drawn_by_where_there_is_text() -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(10),
        sampler=PrioritizedSampler(10, 1.0, 1.0, eps=0.0),
        batch_size=30,
    )
    rb.extend(items("w", "x", "y"))
    rb.update_priority([0, 1, 2], [0.0, 0.0, 1.0])
    assert set(rb.sample()[TEXT]) == {"y"}


# -- changes ---------------------------------------------------------------------------------------


def test_items_and_entries_are_changed_where_they_are() -> None:
    rb = rb_of("w", "x", "y")
    rb[1] = items("new", start=7)[0]
    assert rb[:][TEXT] == ["w", "new", "y"]
    rb[[0, 2]] = items("p", "q")
    assert rb[:][TEXT] == ["p", "new", "q"]
    rb.set_at_(TEXT, "z", 2)
    assert rb[:][TEXT] == ["p", "new", "z"]
    rb.set_at_(TEXT, ["one", "two"], slice(0, 2))
    assert rb[:][TEXT] == ["one", "two", "z"]
    rb.set_(TEXT, NonTensorStack("a", "b", "c"))
    assert rb[:][TEXT] == ["a", "b", "c"]
    rb.set_(TEXT, "all")
    assert rb[:][TEXT] == ["all"] * 3
    assert rb.write_count == 3
    with pytest.raises(SchemaMismatchError, match="2 objects cannot be assigned to 3 elements"):
        rb.set_(TEXT, ["a", "b"])


def test_a_new_entry_of_text_adds_a_column() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    rb.extend(TensorDict({"a": torch.arange(2)}, [2]))
    data = rb[:].clone()
    data["text"] = ["x", "y"]
    rb.write_all(data)
    assert rb[:]["text"] == ["x", "y"]
    rb.extend(data)
    assert rb[:]["text"] == ["x", "y", "x", "y"]


def test_text_where_there_was_none_and_none_where_there_was_are_refused() -> None:
    rb = rb_of("w", "x")
    with pytest.raises(SchemaMismatchError, match=r"leaf 'n\.text' is missing"):
        rb.extend(TensorDict({"a": torch.arange(2)}, [2]))
    with pytest.raises(SchemaMismatchError, match=r"leaf 'n\.text' is object\[2\], but this"):
        rb.extend(TensorDict({"a": torch.arange(2), "n": {"text": torch.zeros(2)}}, [2]))
    with pytest.raises(SchemaMismatchError, match="'more' of this write is not a leaf"):
        rb.extend(items("y").set("more", NonTensorStack("z")))
    with pytest.raises(SchemaMismatchError, match=r"leaf 'a' is int64\[1\]"):
        rb.extend(TensorDict({"a": NonTensorStack("t"), "n": {"text": NonTensorStack("z")}}, [1]))
    assert len(rb) == rb.write_count == 2
    assert rb[:][TEXT] == ["w", "x"]


def test_an_emptied_buffer_takes_text_again() -> None:
    rb = rb_of("w", "x")
    rb.empty()
    assert len(rb) == 0
    rb.extend(items("y"))
    assert rb[:][TEXT] == ["y"]


def test_a_state_brings_text_back() -> None:
    rb = rb_of("w", ["a", "list"], None, size=4)
    rb.extend(items("x", "y"))
    other = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
    other.load_state_dict(rb.state_dict())
    assert other[:][TEXT] == ["y", ["a", "list"], None, "x"]
    assert other[:]["a"].tolist() == [1, 1, 2, 0]
    assert other.extend(items("z")).tolist() == [1]


def test_the_callers_tensors_may_have_text_next_to_them() -> None:
    data = items("w", "x", "y")
    rb = ReplayBuffer(storage=TensorStorage(data), batch_size=10)
    assert rb[:][TEXT] == ["w", "x", "y"]
    rb.extend(items("new", start=9))
    assert rb[:][TEXT] == ["new", "x", "y"]
    assert data["a"].tolist() == [9, 1, 2]
    assert rb.sample()[TEXT][0] in ("new", "x", "y")


def test_threads_never_see_the_text_of_another_item() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=16)
    rb.extend(items("0", "1"))
    stop, wrong = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            sample = rb.sample()
            if sample[TEXT] != [str(a) for a in sample["a"].tolist()]:
                wrong.append(sample)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for i in range(2, 400, 2):
        rb.extend(items(str(i), str(i + 1), start=i))
    stop.set()
    for reader in readers:
        reader.join()
    assert wrong == []


# -- elsewhere -------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["directory", "shared tensors"])
def test_a_shared_storage_refuses_text_and_names_one_that_takes_it(
    where: str, tmp_path: Path
) -> None:
    storage: Any = {
        "directory": lambda: LazyMemmapStorage(4, scratch_dir=tmp_path / "b", shared_init=True),
        "shared tensors": lambda: LazyTensorStorage(4, shared_init=True),
    }[where]()
    rb = ReplayBuffer(storage=storage, batch_size=2)
    with pytest.raises(
        TypeError, match=r"entry 'n' -> entry 'text' contains text.*LazyStackStorage"
    ):
        rb.extend(items("x", "y"))
    assert len(rb) == 0
    rb.extend(TensorDict({"a": torch.arange(2)}, [2]))
    assert rb[:]["a"].tolist() == [0, 1]
    storage.cleanup()
    rb.close()


def test_text_that_is_no_entry_of_a_tensordict_is_refused() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    for data in ({"a": torch.zeros(2), "t": ["x", "y"]}, {"t": "x"}, ["x", "y"]):
        with pytest.raises(TypeError, match=r"'x' in the data is not a tensor.*ListStorage"):
            rb.extend(data)
    with pytest.raises(TypeError, match="is not a tensor"):
        rb.extend(NonTensorStack("x", "y"))


def test_a_storage_with_text_refuses_to_go_to_another_process() -> None:
    with pytest.raises(RuntimeError, match=r"only this process can access.*another process"):
        pickle.dumps(rb_of("x").storage)


def test_text_in_the_child_of_a_fork_says_whose_it_is() -> None:
    rb = rb_of("x")
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork warns if torch has threads
        child = os.fork()
    if not child:
        said = []
        for use in (lambda: rb.extend(items("y")), rb.sample, lambda: rb[:]):
            try:
                use()
            except RuntimeError as error:
                said.append(str(error))
        os.write(write, "\n".join(said).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read().splitlines()
    assert len(said) == 3
    assert all(f"belong to process {os.getpid()}" in words for words in said)
    assert rb[:][TEXT] == ["x"]
