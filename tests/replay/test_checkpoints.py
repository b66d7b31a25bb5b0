"""A save that is loaded restores every value; a load that fails changes nothing."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack

from shmbuffer import (
    BufferExistsError,
    BufferInUseError,
    CorruptBufferError,
    IncompatibleVersionError,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Sampler,
    SamplerWithoutReplacement,
    SchemaMismatchError,
    SpaceError,
    Storage,
    StorageCheckpointerBase,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
    TensorStorageCheckpointer,
    Writer,
)
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.layout import PARTS
from shmbuffer.storages.movers import tensor_rows
from shmbuffer.torchrl.compat.folders import read_folder
from tests.kit.items import Point, Step, Transition, Trap, alike, items, numbers
from tests.kit.programs import Program
from tests.kit.rings import engine_of, ring_of
from tests.replay.conftest import MakeStorage

pytestmark = pytest.mark.product(few=4)


def learner(storage: Any, **options: Any) -> TensorDictPrioritizedReplayBuffer:
    options = {"alpha": 0.7, "beta": 0.4, "batch_size": 4, **options}
    return TensorDictPrioritizedReplayBuffer(storage=storage, **options)


def tree(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


# -- there and back --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 3, 8, 11], ids=["empty", "partly full", "full", "gone round"])
def test_everything_comes_back_by_value(make: MakeStorage, count: int, tmp_path: Path) -> None:
    rb = learner(make(8), generator=torch.Generator().manual_seed(5))
    rb.extend(items(0, 1))
    rb.empty()
    if count:
        rb.extend(items(0, count))
        rb.update_priority(torch.arange(3), torch.tensor([0.1, 3.0, 0.2]))
        rb.update_priority(torch.tensor([1]), torch.tensor([1 / 3]))
        rb.sample()
    rb.dumps(tmp_path / "run")

    other = learner(make(8), alpha=0.2, beta=0.9, batch_size=7)
    other.loads(tmp_path / "run")
    assert len(other) == len(rb) == min(count, 8)
    if count:
        assert numbers(other[:]) == numbers(rb[:])
    assert other.write_count == rb.write_count == count
    assert (other.sampler.alpha, other.sampler.beta, other.batch_size) == (0.7, 0.4, 4)
    assert torch.equal(other.generator.get_state(), rb.generator.get_state())
    held = ring_of(rb).live.committed()
    assert ring_of(other).live.committed().tolist() == held.tolist()
    assert np.array_equal(
        ring_of(other).tree.priorities(held),
        ring_of(rb).tree.priorities(held),
        equal_nan=True,
    )
    assert ring_of(other).tree.max_priority == ring_of(rb).tree.max_priority
    assert other.sampler.default_priority == rb.sampler.default_priority
    # From here on both buffers behave identically.
    for one in (rb, other):
        one.extend(items(100, 103))
    assert numbers(other[:]) == numbers(rb[:])
    for _ in range(3):
        mine, theirs = rb.sample(), other.sample()
        assert numbers(mine) == numbers(theirs)
        assert torch.equal(mine["_weight"], theirs["_weight"])
    assert engine_of(other).check().ok


def test_raw_priorities_come_back_exactly_whatever_alpha_is(tmp_path: Path) -> None:
    raw = torch.tensor([1e-30, 0.1, 1 / 3, 7e7], dtype=torch.float64)
    rb = learner(LazyTensorStorage(4), alpha=0.0)
    rb.extend(items(0, 4))
    rb.update_priority(torch.arange(4), raw)
    rb.dumps(tmp_path)
    other = learner(LazyTensorStorage(4))
    other.loads(tmp_path)
    assert other.sampler.alpha == 0.0
    assert ring_of(other).tree.priorities().tolist() == raw.tolist()
    other.sampler.alpha = 0.5
    assert ring_of(other).tree.mass() == pytest.approx((raw.numpy() + 1e-8) ** 0.5)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("dumps", ()), ("dump", ()), ("save", ())],
)
@pytest.mark.parametrize("load", ["loads", "load"])
def test_every_name_of_it_does_the_same(
    name: str, arguments: tuple[Any, ...], load: str, tmp_path: Path
) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(8))
    rb.extend(items(0, 5))
    getattr(rb, name)(tmp_path, *arguments)
    other = ReplayBuffer(storage=LazyTensorStorage(8))
    getattr(other, load)(str(tmp_path))
    assert numbers(other[:]) == list(range(5))


def test_parts_are_saved_and_loaded_alone(tmp_path: Path) -> None:
    rb = learner(LazyTensorStorage(8))
    rb.extend(items(0, 11))
    rb.update_priority(torch.tensor([4]), torch.tensor([5.0]))
    for part in ("storage", "sampler", "writer"):
        getattr(rb, part).dumps(tmp_path / part)
    other = learner(LazyTensorStorage(8), beta=0.1)
    other.storage.loads(tmp_path / "storage")
    assert numbers(other[:]) == numbers(rb[:])
    other.sampler.load(tmp_path / "sampler")
    assert other.sampler.beta == 0.4
    assert ring_of(other).tree.priorities()[4] == 5.0
    other.writer.loads(tmp_path / "writer")
    assert (other.write_count, other.writer._cursor) == (11, 3)
    with pytest.raises(BufferExistsError, match=r"does not belong to a save of a sampler.*Nothing"):
        rb.sampler.dumps(tmp_path / "writer")
    assert RandomSampler().dumps(tmp_path / "nothing") is None
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize(
    "data",
    [
        torch.arange(12).view(4, 3).to(torch.bfloat16),
        (torch.arange(4), {"x": torch.ones(4, 2), 3: [torch.zeros(4, dtype=torch.bool)]}),
        {"a.b": torch.arange(4), "a": {"b": torch.arange(4) + 10}},
        Point(torch.arange(4), torch.rand(4, 2, 2, dtype=torch.complex64)),
        TensorDict({"empty": torch.zeros(4, 0), "n": TensorDict({}, [4]), "x": torch.rand(4)}, [4]),
        TensorDict({"nested": TensorDict({"x": torch.rand(4, 3, 2)}, [4, 3])}, [4]),
    ],
    ids=["tensor", "pytree", "keys with dots", "namedtuple", "leaf without bytes", "nested batch"],
)
def test_every_form_of_data_comes_back(data: Any, make_private: Any, tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=make_private(6))
    rb.extend(data)
    rb.dumps(tmp_path)
    other = ReplayBuffer(storage=make_private(6))
    other.loads(tmp_path)
    assert alike(other[:], rb[:])
    if isinstance(data, TensorDict) and "nested" in data:
        assert other[:]["nested"].batch_size == torch.Size([4, 3])


def test_text_and_objects_next_to_tensors_come_back(tmp_path: Path) -> None:
    notes = ["a", {"k": [1, 2.5, None]}, (1, b"x"), torch.arange(3)]
    data = TensorDict({"a": torch.arange(4), "n": {"note": NonTensorStack(*notes)}}, [4])
    rb = ReplayBuffer(storage=LazyTensorStorage(6))
    rb.extend(data)
    rb.dumps(tmp_path)
    other = ReplayBuffer(storage=LazyTensorStorage(6))
    other.loads(tmp_path)
    assert other[:]["a"].tolist() == [0, 1, 2, 3]
    found = list(other[:]["n", "note"])
    assert found[:3] == notes[:3]
    assert type(found[2]) is tuple
    assert torch.equal(found[3], torch.arange(3))
    # in TorchRL's layout, as far as JSON can represent it
    texts = ReplayBuffer(storage=LazyTensorStorage(3))
    texts.extend(TensorDict({"t": NonTensorStack("x", "y")}, [2]))
    texts.dumps(tmp_path / "texts", layout="torchrl")
    assert list(TensorDict.load_memmap(tmp_path / "texts" / "storage")["t"]) == ["x", "y", "x"]


def test_a_tensorclass_with_objects_comes_back_as_its_class(tmp_path: Path) -> None:
    data = Step(obs=torch.arange(2), text=NonTensorStack("x", "y"), batch_size=[2])
    rb = ReplayBuffer(storage=LazyTensorStorage(3))
    rb.extend(data)
    rb.dumps(tmp_path)
    other = ReplayBuffer(storage=LazyTensorStorage(3))
    other.loads(tmp_path)
    assert type(other[:]) is Step
    assert list(other[:].text) == ["x", "y"]


class Thing:
    """An object that only pickle can save."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing)

    __hash__ = None  # type: ignore[assignment]


def test_objects_are_pickled_only_where_that_is_allowed(tmp_path: Path) -> None:
    def buffer(allow_pickle: bool) -> ReplayBuffer:
        checkpointer = TensorStorageCheckpointer(allow_pickle=allow_pickle)
        return ReplayBuffer(storage=LazyTensorStorage(3), checkpointer=checkpointer)

    data = TensorDict({"a": torch.arange(2), "o": NonTensorStack("x", Thing())}, [2])
    strict, lenient = buffer(False), buffer(True)
    for rb in (strict, lenient):
        rb.extend(data)
    with pytest.raises(TypeError, match=r"item 1 .*Thing.*TensorStorageCheckpointer\(allow_pickle"):
        strict.dumps(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    lenient.dumps(tmp_path / "run")
    other = buffer(False)
    with pytest.raises(ValueError, match="allow_pickle=True"):
        other.loads(tmp_path / "run")
    assert not other.storage.initialized
    other = buffer(True)
    other.loads(tmp_path / "run")
    assert list(other[:]["o"]) == ["x", Thing()]


def test_several_dimensions_come_back(make: MakeStorage, tmp_path: Path) -> None:
    def batch(first: int, steps: int) -> TensorDict:
        n = torch.arange(first, first + 3 * steps).view(3, steps)
        return TensorDict({"a": n}, [3, steps])

    rb = learner(make(12, ndim=2))
    rb.extend(batch(0, 6))
    rb.update_priority(torch.tensor([[1, 2]]), torch.tensor([9.0]))
    rb.dumps(tmp_path)
    other = learner(make(12, ndim=2))
    other.loads(tmp_path)
    assert other[:]["a"].tolist() == rb[:]["a"].tolist()
    assert (len(other), other.write_count, ring_of(other).cursor) == (12, 18, 6)
    assert ring_of(other).tree.priorities().tolist() == ring_of(rb).tree.priorities().tolist()
    flat = learner(make(12))
    with pytest.raises(SchemaMismatchError, match="ndim=2, but the storage that loads it has ndim"):
        flat.loads(tmp_path)
    assert not flat.storage.initialized


def test_items_that_are_missing_stay_missing(make: MakeStorage, tmp_path: Path) -> None:
    rb = learner(make(6))
    rb.extend(items(0, 3))
    ring_of(rb).claims.claim(1)  # its writer abandoned the claim
    ring_of(rb).claims.abort()
    rb.extend(items(4, 5))
    rb.dumps(tmp_path)
    other = learner(make(6))
    other.loads(tmp_path)
    assert numbers(other[:]) == [0, 1, 2, 4]
    assert [other.storage.contains(at) for at in range(6)] == [True] * 3 + [False, True, False]
    assert (len(other), ring_of(other).cursor) == (4, 5)
    with pytest.raises(IndexError):
        other[3]


def test_placed_items_come_back_to_their_places(tmp_path: Path) -> None:
    storage = LazyTensorStorage(6)
    storage.set([4, 1], items(10, 12))
    storage.dumps(tmp_path)
    other = LazyTensorStorage(6)
    other.loads(tmp_path)
    assert other.get(4)["a"] == 10
    assert other.get(1)["a"] == 11
    assert len(other) == 2
    assert ring_of(other).cursor == 0


def test_the_callers_own_tensors_are_saved_and_filled(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=TensorStorage(items(0, 5)))
    rb.dumps(tmp_path)
    data = items(50, 55)
    other = ReplayBuffer(storage=TensorStorage(data))
    other.loads(tmp_path)
    assert numbers(data) == [0, 1, 2, 3, 4]


def test_the_source_of_an_item_is_kept_and_no_new_client_gets_it(
    directory: Any, tmp_path: Path
) -> None:
    one, two = learner(directory()), learner(directory())
    for n in range(0, 6, 2):
        one.extend(items(n, n + 1))
        two.extend(items(n + 1, n + 2))
    one.dumps(tmp_path / "run")
    sources = ring_of(one).live.sources[:6].tolist()
    assert sources[0::2] == [sources[0]] * 3
    assert sources[1::2] == [sources[1]] * 3
    other = LazyMemmapStorage(10, scratch_dir=tmp_path / "other", shared_init=True)
    with learner(other) as loaded:
        loaded.loads(tmp_path / "run")
        loaded.extend(items(6, 7))
        first, second, *rest, new = ring_of(loaded).live.sources[:7].tolist()
        assert rest == [first, second] * 2
        assert len({first, second, new}) == 3
        writers = layout.writer_of(ring_of(loaded).live.sources[:2])
        assert writers.min() >= layout.INCARNATIONS  # no client of this buffer uses these numbers
        loaded.dumps(tmp_path / "again")
    again = LazyTensorStorage(10)
    again.loads(tmp_path / "again" / "storage")
    assert len(set(ring_of(again).live.sources[:7].tolist())) == 3


def test_a_pass_without_replacement_goes_on_where_it_was(make: MakeStorage, tmp_path: Path) -> None:
    def buffer() -> TensorDictReplayBuffer:
        sampler = SamplerWithoutReplacement()
        return TensorDictReplayBuffer(storage=make(9), sampler=sampler, batch_size=3)

    rb = buffer()
    rb.extend(items(0, 9))
    seen = numbers(rb.sample())
    rb.dumps(tmp_path)
    other = buffer()
    other.loads(tmp_path)
    order = [numbers(rb.sample()), numbers(rb.sample())]
    assert [numbers(other.sample()), numbers(other.sample())] == order
    assert sorted(seen + order[0] + order[1]) == list(range(9))


@pytest.mark.parametrize("ranked", [False, True])
def test_the_files_of_another_kind_of_writer_are_refused_by_its_name(
    ranked: bool, tmp_path: Path
) -> None:
    def made(ranked: bool) -> TensorDictReplayBuffer:
        writer = TensorDictMaxValueWriter(rank_key="r") if ranked else TensorDictRoundRobinWriter()
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4), writer=writer, batch_size=2)
        rb.extend(TensorDict({"r": torch.arange(6.0)}, [6]))
        return rb

    kinds = ["TensorDictMaxValueWriter", "RoundRobinWriter"]
    saved, this = kinds if ranked else kinds[::-1]
    made(ranked).dumps(tmp_path / "run", layout="torchrl")
    other = made(not ranked)
    with pytest.raises(
        SchemaMismatchError, match=f"was saved by a {saved}, but this writer is a {this}; load it"
    ):
        other.loads(tmp_path / "run")
    assert len(other) == 4


def test_a_writer_of_the_best_items_goes_on_with_the_same_ranks(tmp_path: Path) -> None:
    def buffer() -> TensorDictReplayBuffer:
        writer = TensorDictMaxValueWriter(rank_key="score", reduction="max")
        return TensorDictReplayBuffer(storage=LazyTensorStorage(3), writer=writer)

    def ranked(*scores: float) -> TensorDict:
        return TensorDict({"score": torch.tensor(scores, dtype=torch.float64)}, [len(scores)])

    rb = buffer()
    rb.extend(ranked(0.1, 1 / 3, 2.0, 0.2))
    rb.dumps(tmp_path)
    other = buffer()
    other.writer._reduction = "sum"
    other.loads(tmp_path)
    assert other.writer.reduction == "max"
    assert other.write_count == rb.write_count == 4
    for one in (rb, other):
        assert one.extend(ranked(0.15, 0.3)).tolist() == [-1, 0]
    assert other[:]["score"].tolist() == rb[:]["score"].tolist() == [0.3, 1 / 3, 2.0]


def test_generations_are_written_as_torchrl_counts_them(tmp_path: Path) -> None:
    writer = TensorDictRoundRobinWriter(track_generations=True)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4), writer=writer, batch_size=2)
    rb.extend(items(0, 6))
    rb.dumps(tmp_path, layout="torchrl")
    content = json.loads((tmp_path / "writer" / "metadata.json").read_text())
    assert content["generation_shape"] == [4]
    written = np.fromfile(tmp_path / "writer" / "generation.memmap", np.int64)
    assert written.tolist() == [2, 2, 1, 1]


class Scale(torch.nn.Module):
    """A transform with state."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(factor))

    def forward(self, data: TensorDict) -> TensorDict:
        return data.set("a", data["a"] * self.factor)


@pytest.mark.parametrize("layout", ["shmbuffer", "torchrl"])
def test_the_state_of_transforms_comes_back(layout: str, tmp_path: Path) -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4), transform=Scale(3.0), batch_size=2)
    rb.extend(items(1, 2))
    rb.dumps(tmp_path, layout=layout)
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(4), transform=Scale(1.0), batch_size=2)
    other.loads(tmp_path)
    assert other.sample()["a"].tolist() == [3.0, 3.0]
    if layout == "torchrl":
        states = torch.load(tmp_path / "transform.t", weights_only=True)
        assert list(states) == ["transforms.0.factor"]
    none = TensorDictReplayBuffer(storage=LazyTensorStorage(4), transform=lambda data: data)
    with pytest.raises(ValueError, match=r"contains the state .*0.*transforms are \['function'\]"):
        none.loads(tmp_path)
    assert not none.storage.initialized


class Chain(torch.nn.Module):
    """A stand-in for TorchRL's Compose."""

    def __init__(self, *factors: float) -> None:
        super().__init__()
        self.transforms = torch.nn.ModuleList(map(Scale, factors))

    def forward(self, data: TensorDict) -> TensorDict:
        for transform in self.transforms:
            data = transform(data)
        return data


def test_a_chain_that_is_the_only_transform_is_the_chain(tmp_path: Path) -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4), transform=Chain(2.0, 5.0))
    rb.extend(items(1, 2))
    rb.dumps(tmp_path, layout="torchrl")
    names = ["transforms.0.factor", "transforms.1.factor"]
    assert list(torch.load(tmp_path / "transform.t", weights_only=True)) == names
    for transform in (Chain(1.0, 1.0), [Scale(1.0), Scale(1.0)]):
        other = TensorDictReplayBuffer(storage=LazyTensorStorage(4), transform=transform)
        other.loads(tmp_path)
        assert other.sample(2)["a"].tolist() == [10.0, 10.0]


@pytest.mark.parametrize("place", ["transform.t", "prefetch.pkl", "storage/t/other.pickle"])
def test_nothing_is_unpickled(place: str, tmp_path: Path) -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4), transform=Scale(3.0), batch_size=2)
    rb.extend(items(0, 3))
    rb.dumps(tmp_path / "run", layout="torchrl")
    file = tmp_path / "run" / place
    if place == "transform.t":
        torch.save({"trap": Trap(tmp_path / "trapped")}, file)
    else:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(pickle.dumps(Trap(tmp_path / "trapped")))
    if place.startswith("storage"):  # as tensordict saves objects that are not tensors
        (file.parent / "meta.json").write_text('{"_type": "NonTensorData"}')
        metadata = file.parent.parent / "storage_metadata.json"
        metadata.write_text('{"is_pytree": false, "len": 3, "metadata": {}}')
        meta = json.loads((file.parent.parent / "meta.json").read_text())
        (file.parent.parent / "meta.json").write_text(
            json.dumps({"t": {"type": "NonTensorData"}, **meta})
        )
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(4), transform=Scale(1.0), batch_size=2)
    if place == "prefetch.pkl":
        other.loads(tmp_path / "run")
        assert numbers(other.storage.get(slice(None))) == [0, 1, 2]
    else:
        with pytest.raises(ValueError, match=r"running code from it|were pickled"):
            other.loads(tmp_path / "run")
        assert not other.storage.initialized
    assert not (tmp_path / "trapped").exists()


def test_the_batch_size_of_the_save_counts_unless_it_has_none(tmp_path: Path) -> None:
    for saved, own, expected in [(4, 2, 4), (None, 2, 2), (4, None, 4), (None, None, None)]:
        rb = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=saved)
        rb.extend(items(0, 3))
        rb.dumps(tmp_path)
        other = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=own)
        other.loads(tmp_path)
        assert other.batch_size == expected


def test_a_generator_that_is_there_is_set_and_one_that_is_not_is_made(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4), generator=torch.Generator().manual_seed(3))
    rb.extend(items(0, 3))
    rb.dumps(tmp_path / "with")
    mine = torch.Generator()
    other = ReplayBuffer(storage=LazyTensorStorage(4), generator=mine)
    other.loads(tmp_path / "with")
    assert other.generator is mine
    third = ReplayBuffer(storage=LazyTensorStorage(4))
    third.loads(tmp_path / "with")
    assert third.sampler._rng is third.generator is not None
    assert torch.equal(third.generator.get_state(), mine.get_state())
    rb.set_rng(None)
    rb.dumps(tmp_path / "with")  # replaces the save with a generator, whose state must not remain
    fourth = ReplayBuffer(storage=LazyTensorStorage(4))
    fourth.loads(tmp_path / "with")
    assert fourth.generator is None


def test_batches_that_were_made_ahead_are_drawn_again(tmp_path: Path) -> None:
    def buffer(**options: Any) -> TensorDictReplayBuffer:
        generator = torch.Generator().manual_seed(1)
        sampler = SamplerWithoutReplacement()
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(12),
            sampler=sampler,
            batch_size=3,
            generator=generator,
            **options,
        )

    with buffer(prefetch=3) as rb, buffer() as plain, buffer(prefetch=2) as other:
        for one in (rb, plain):
            one.extend(items(0, 12))
            one.sample()
        rb.dumps(tmp_path)  # two more batches are prefetched but not delivered
        other.extend(items(50, 62))
        other.sample()
        other.loads(tmp_path)
        rest = [numbers(plain.sample()) for _ in range(3)]
        assert [numbers(other.sample()) for _ in range(3)] == rest
        assert [numbers(rb.sample()) for _ in range(3)] == rest


# -- another capacity, other leaves ----------------------------------------------------------------


@pytest.mark.parametrize("count", [5, 8, 11])
def test_a_larger_buffer_takes_it_in_the_order_of_age(
    make: MakeStorage, count: int, tmp_path: Path
) -> None:
    rb = learner(make(8))
    rb.extend(items(0, count))
    kept = list(range(max(0, count - 8), count))
    for n in kept:
        rb.update_priority(torch.tensor([n % 8]), torch.tensor([n + 1.0]))
    rb.dumps(tmp_path)
    other = learner(make(20))
    other.loads(tmp_path)
    assert numbers(other[:]) == kept
    assert ring_of(other).tree.priorities()[: len(kept)].tolist() == [n + 1.0 for n in kept]
    assert (len(other), other.write_count) == (len(kept), count)
    assert other.extend(items(count, count + 1)).tolist() == [len(kept)]
    smaller = learner(make(6))
    if len(kept) > 6:
        smaller.extend(items(70, 73))
        with pytest.raises(ValueError, match="items in 8 slots, but the storage has a capacity"):
            smaller.loads(tmp_path)
        assert numbers(smaller[:]) == [70, 71, 72]
        fresh = learner(make(6))
        with pytest.raises(ValueError, match="capacity of 6"):
            fresh.loads(tmp_path)
        assert not fresh.storage.initialized
    else:
        smaller.loads(tmp_path)
        assert numbers(smaller[:]) == kept


def test_the_rest_of_a_pass_and_ranks_move_with_the_items(tmp_path: Path) -> None:
    sampler = SamplerWithoutReplacement(shuffle=False)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(6), sampler=sampler, batch_size=2)
    rb.extend(items(0, 8))
    rb.sample()
    left = [numbers(rb.sample()) for _ in range(2)]
    rb.sampler._empty()
    rb.sample()
    rb.dumps(tmp_path / "pass")
    sampler = SamplerWithoutReplacement(shuffle=False)
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(9), sampler=sampler, batch_size=2)
    other.loads(tmp_path / "pass")
    assert numbers(other[:]) == [2, 3, 4, 5, 6, 7]
    assert [numbers(other.sample()) for _ in range(2)] == left


def wrong(kind: str) -> TensorDict:
    if kind == "missing":
        return TensorDict({"a": torch.arange(2)}, [2])
    if kind == "unknown":
        return items(0, 2).set("more", torch.ones(2))
    if kind == "dtype":
        return items(0, 2).set("a", torch.ones(2))
    return items(0, 2).set(("b", "c"), torch.ones(2, 4))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", r"leaf 'b\.c', which is not a leaf of this buffer"),
        ("unknown", r"leaf 'more' \(float32\[\]\) is missing in the checkpoint"),
        ("dtype", r"leaf 'a' is float32\[\], but the checkpoint in .* has int64\[\]"),
        ("shape", r"leaf 'b\.c' is float32\[4\], but the checkpoint in .* has float32\[3\]"),
    ],
)
def test_other_leaves_are_refused_before_anything_changes(
    make: MakeStorage, kind: str, message: str, tmp_path: Path
) -> None:
    rb = learner(make(4), generator=torch.Generator())
    rb.extend(items(0, 3))
    rb.dumps(tmp_path)
    other = learner(make(4), beta=0.1)
    other.extend(wrong(kind))
    before = other.state_dict()
    with pytest.raises(SchemaMismatchError, match=message):
        other.loads(tmp_path)
    after = other.state_dict()
    assert after["_writer"] == before["_writer"]
    assert torch.equal(after["_storage"]["_storage"]["a"], before["_storage"]["_storage"]["a"])
    assert (other.sampler.beta, other.batch_size, other.generator) == (0.1, 4, None)


def test_a_save_of_another_sampler_is_refused_before_anything_changes(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    rb.extend(items(0, 3))
    rb.dumps(tmp_path)
    other = learner(LazyTensorStorage(4))
    with pytest.raises(FileNotFoundError, match=r"no state for a sampler of this.*set_sampler"):
        other.loads(tmp_path)
    assert not other.storage.initialized
    rb.loads(tmp_path)
    rb.set_sampler(PrioritizedSampler(4, 0.7, 0.4))
    assert ring_of(rb).tree.mass().tolist() == pytest.approx([1, 1, 1, 0])


def test_a_buffer_that_nothing_was_written_to_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="Cannot save a non-initialized storage"):
        ReplayBuffer(storage=LazyTensorStorage(4)).dumps(tmp_path / "run")
    assert os.listdir(tmp_path) == []


def test_where_nothing_was_saved_says_so(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    with pytest.raises(FileNotFoundError, match="no buffer was saved in this directory"):
        rb.loads(tmp_path)
    with pytest.raises(FileNotFoundError, match="no tensor storage was saved"):
        rb.storage.loads(tmp_path)
    with pytest.raises(FileNotFoundError, match="no state for a writer of this class"):
        rb.writer.loads(tmp_path)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("buffer_metadata.json", b"{"),
        ("buffer_metadata.json", b"{}"),
        ("storage/storage_metadata.json", b"[]"),
        ("storage/storage_metadata.json", b'{"shmbuffer": {"format": 1, "slots": 1e30}}'),
        ("storage/meta.json", b'{"a": {"dtype": "torch.int64", "shape": "x"}, "shape": [4]}'),
        ("storage/a.memmap", b"short"),
        ("storage/shmbuffer.items.npy", b""),
        ("sampler/sampler_metadata.json", b'{"_alpha": "x"}'),
        ("sampler/shmbuffer.priorities.memmap", b"short"),
        ("writer/metadata.json", b'{"cursor": null}'),
    ],
)
def test_damage_is_named_and_nothing_is_changed(file: str, damage: bytes, tmp_path: Path) -> None:
    rb = learner(LazyTensorStorage(4))
    rb.extend(items(0, 3))
    rb.dumps(tmp_path, layout="torchrl")
    (tmp_path / file).write_bytes(damage)
    other = learner(LazyTensorStorage(4))
    other.extend(items(7, 8))
    with pytest.raises(CorruptBufferError) as caught:
        other.loads(tmp_path)
    assert str(tmp_path / Path(file).parent) in str(caught.value)
    assert numbers(other[:]) == [7]


@pytest.mark.parametrize(
    "file",
    [
        "buffer_metadata.json",
        "storage/storage_metadata.json",
        "sampler/sampler_metadata.json",
        "writer/metadata.json",
    ],
)
def test_a_save_of_another_format_is_refused_and_nothing_is_changed(
    file: str, tmp_path: Path
) -> None:
    rb = learner(LazyTensorStorage(4))
    rb.extend(items(0, 3))
    rb.dumps(tmp_path, layout="torchrl")
    metadata = tmp_path / file
    content = json.loads(metadata.read_text())
    content["shmbuffer"]["format"] = 7
    metadata.write_text(json.dumps(content))
    other = learner(LazyTensorStorage(4))
    other.extend(items(7, 8))
    message = (
        rf"{metadata}: was saved in format 7 by another version of shmbuffer, but this version "
        "only reads format 1; load the save with the version that wrote it"
    )
    with pytest.raises(IncompatibleVersionError, match=message):
        other.loads(tmp_path)
    assert numbers(other[:]) == [7]


# -- one moment, while others write ----------------------------------------------------------------

WRITER = """
    import sys
    import numpy as np
    from shmbuffer.memory import Engine
    with Engine.open(sys.argv[1], None) as engine:
        number = int(sys.argv[2])
        print("writing", flush=True)
        while True:
            n = np.arange(number, number + 5)
            c, d = np.repeat(n[:, None], 3, 1).astype(np.float32), (n % 2 == 0)
            engine.ring().write([x.ctypes.data for x in (n, c, d)], 5, (n + 1).astype(np.float64))
            number += 5
"""


def test_a_save_is_of_one_moment_though_others_keep_writing(tmp_path: Path) -> None:
    capacity = 400
    storage = LazyMemmapStorage(capacity, scratch_dir=tmp_path / "buffer", shared_init=True)
    with learner(storage) as rb:
        rb.extend(items(0, 5))
        with Program.python(WRITER, tmp_path / "buffer", 5) as writer:
            assert writer.line() == "writing"
            for _ in range(6):
                rb.dumps(tmp_path / "run")
                other = learner(LazyTensorStorage(capacity))
                other.loads(tmp_path / "run")
                found = sorted(numbers(other[:]))
                count = other.write_count
                assert found == list(range(count - len(found), count))
                assert len(found) in (min(count, capacity), capacity - 5)  # five are being written
                held = ring_of(other).live.committed()
                given = ring_of(other).tree.priorities(held)
                expected = other[:]["a"].numpy() + 1.0
                default = held < 5  # items that were written here, while they are still stored
                assert np.array_equal(given[~default], expected[~default])
                assert (ring_of(other).cursor - count) % capacity in (0, 5)


def test_a_buffer_that_others_use_is_not_loaded_into(directory: Any, tmp_path: Path) -> None:
    rb = learner(LazyTensorStorage(10))
    rb.extend(items(0, 3))
    rb.dumps(tmp_path / "run")
    one, other = learner(directory()), learner(directory())
    one.extend(items(7, 9))
    with pytest.raises(BufferInUseError, match="cannot be loaded while other processes") as caught:
        one.loads(tmp_path / "run")
    assert caught.value.pids == [os.getpid()]
    assert numbers(other[:]) == [7, 8]
    other.close()
    one.loads(tmp_path / "run")
    assert numbers(one[:]) == [0, 1, 2]


class SavesAgain(torch.nn.Module):
    """Is saved again by another process while it loads, as a trainer may do in an evaluation."""

    def __init__(self, rb: ReplayBuffer, path: Path, times: int) -> None:
        super().__init__()
        self.register_buffer("x", torch.zeros(()))
        self.rb, self.path, self.times = [rb], path, times

    def forward(self, data: Any) -> Any:
        return data

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        if self.times:
            self.times -= 1
            self.rb[0].extend(items(100, 101))
            self.rb[0].dumps(self.path)
        return super().load_state_dict(*arguments, **options)


@pytest.mark.parametrize("foreign", [False, True])
def test_a_save_that_is_replaced_while_it_is_read_is_read_again(
    foreign: bool, tmp_path: Path
) -> None:
    class Still(SavesAgain):
        def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
            return torch.nn.Module.load_state_dict(self, *arguments, **options)

    path = tmp_path / "run"
    rb = ReplayBuffer(storage=LazyTensorStorage(9))
    rb.append_transform(Still(rb, path, 0))
    rb.extend(items(0, 3))
    rb.dumps(path)
    if foreign:
        (path / "notes.txt").write_text("mine")
    other = ReplayBuffer(storage=LazyTensorStorage(9), transform=SavesAgain(rb, path, 2))
    other.loads(path)
    assert numbers(other.storage.get(slice(None))) == [0, 1, 2, 100, 100]
    assert other.write_count == 5
    restless = ReplayBuffer(storage=LazyTensorStorage(90), transform=SavesAgain(rb, path, 99))
    with pytest.raises(RuntimeError, match="replaced by another process during each of 5 attempts"):
        restless.loads(path)


# -- the directory ---------------------------------------------------------------------------------


def test_a_save_replaces_the_one_before_and_leaves_foreign_files_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    rb = learner(LazyTensorStorage(8), generator=torch.Generator())
    rb.extend(items(0, 3))
    rb.dumps(path)
    (path / "model.pt").write_text("mine")
    plain = TensorDictReplayBuffer(storage=LazyTensorStorage(8))
    plain.extend(TensorDict({"z": torch.arange(2)}, [2]))
    plain.dumps(path)
    left = {name for name in tree(path) if ".shmbuffer" not in name}
    assert left == {"model.pt", "storage/meta.json", "storage/z.memmap"}
    assert (path / "model.pt").read_text() == "mine"


@pytest.mark.parametrize("layout", ["shmbuffer", "torchrl"])
def test_a_directory_with_foreign_files_is_refused_before_anything_is_written(
    layout: str, tmp_path: Path
) -> None:
    rb = learner(LazyTensorStorage(8))
    rb.extend(items(0, 3))
    rb.dumps(tmp_path / "run", layout=layout)
    place = tmp_path / "run" if layout == "torchrl" else tmp_path / "run" / "storage"
    (place / "notes.txt").write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(BufferExistsError, match=r"notes.txt in this directory .* Nothing was"):
        rb.dumps(tmp_path / "run", layout=layout)
    assert tree(tmp_path) == before


def test_a_save_ends_at_the_highest_slot_in_use(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(100))
    rb.storage.set([2, 7], items(0, 2))
    rb.dumps(tmp_path)
    assert TensorDict.load_memmap(tmp_path / "storage").batch_size == torch.Size([8])


@pytest.mark.full
def test_a_storage_is_saved_sparse(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10_000_000))
    rb.extend(items(0, 100))
    rb.dumps(tmp_path)
    file = tmp_path / "storage" / "b" / "c.memmap"
    assert file.stat().st_size == 120_000_000
    assert file.stat().st_blocks * 512 < 1_000_000
    other = ReplayBuffer(storage=LazyTensorStorage(1000))
    other.loads(tmp_path)
    assert numbers(other[:]) == list(range(100))


def test_a_disk_without_room_leaves_the_save_before(tmp_path: Path) -> None:
    path = tmp_path / "run"
    rb = ReplayBuffer(storage=LazyTensorStorage(100_000))
    rb.extend(items(0, 100))
    rb.dumps(path)
    before = tree(path)
    rb.extend(items(100, 60_000))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
    try:
        with pytest.raises((OSError, RuntimeError), match=r"(?i)file too large|bytes"):
            rb.dumps(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert tree(path) == before
    assert os.listdir(tmp_path) == ["run"]
    close_what_torch_left_open(tmp_path)


def close_what_torch_left_open(folder: Path) -> None:
    """Closes files that `torch.from_file` leaves open if it cannot extend them."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if target.startswith(f"{folder}/") and target.endswith(".memmap (deleted)"):
                os.close(int(descriptor))


def test_room_is_taken_before_it_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store to a mapped file would end the process if the disk were full."""
    rb = ReplayBuffer(storage=LazyTensorStorage(100))
    rb.extend(items(0, 100))

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SpaceError, match=r"\d+ bytes are needed"):
        rb.dumps(tmp_path / "run")
    assert os.listdir(tmp_path) == []


# -- in place --------------------------------------------------------------------------------------


def in_place(path: Path, capacity: int = 8, **options: Any) -> LazyMemmapStorage:
    return LazyMemmapStorage(capacity, scratch_dir=path / "storage", **options)


def test_a_storage_that_lies_there_already_is_not_copied(tmp_path: Path) -> None:
    with learner(in_place(tmp_path)) as rb:
        rb.extend(items(0, 11))
        rb.update_priority(torch.tensor([4]), torch.tensor([5.0]))
        file = tmp_path / "storage" / "a.memmap"
        inode = file.stat().st_ino
        rb.dumps(tmp_path)
        rb.extend(items(11, 12))  # the files belong to the live buffer
        rb.dumps(tmp_path)
        assert file.stat().st_ino == inode
        assert os.listdir(tmp_path) == ["storage"]
        assert (tmp_path / "storage" / PARTS / "sampler.jsonl").is_file()
        rb.extend(items(12, 13))
    again = in_place(tmp_path)  # no on_existing is needed, because loads expects a directory
    with learner(again, beta=0.9) as other:
        other.loads(tmp_path)
        # the current items rather than the saved ones
        assert sorted(numbers(other[:])) == list(range(5, 13))
        assert other.write_count == 13
        assert other.sampler.beta == 0.4
        assert ring_of(other).tree.priorities()[4] == 5.0 or other[4]["a"] != 4
        assert ring_of(other).tree.max_priority == 5.0
        assert other.extend(items(13, 14)).tolist() == [5]
        assert file.stat().st_ino == inode


@pytest.mark.full
def test_saving_in_place_takes_no_longer_for_a_huge_one(tmp_path: Path) -> None:
    storage = in_place(tmp_path, 10_000_000, reserve=False)
    with ReplayBuffer(storage=storage) as rb:
        rb.extend(items(0, 1000))
        rb.dumps(tmp_path)
        assert (tmp_path / "storage" / "a.memmap").stat().st_blocks * 512 < 100_000


def test_a_part_is_saved_in_place_too(tmp_path: Path) -> None:
    with closing(LazyMemmapStorage(8, scratch_dir=tmp_path / "x")) as storage:
        storage.set(range(3), items(0, 3))
        storage.dumps(tmp_path / "x")
        assert numbers(storage.get(slice(None))) == [0, 1, 2]
    with closing(LazyMemmapStorage(8, scratch_dir=tmp_path / "x")) as again:
        again.loads(tmp_path / "x")
        assert numbers(again.get(slice(None))) == [0, 1, 2]


def test_a_live_buffer_is_loaded_elsewhere_as_it_is_now(tmp_path: Path) -> None:
    with learner(in_place(tmp_path)) as rb:
        rb.extend(items(0, 3))
        rb.dumps(tmp_path)
        rb.extend(items(3, 5))
        rb.update_priority(torch.tensor([4]), torch.tensor([6.0]))
        other = learner(LazyTensorStorage(20))
        other.loads(tmp_path)  # while the save is open, and after it was closed
        assert numbers(other[:]) == [0, 1, 2, 3, 4]
        assert other.write_count == 5
        assert ring_of(other).tree.priorities()[4] == ring_of(other).tree.max_priority == 6.0
    third = learner(LazyTensorStorage(20))
    third.loads(tmp_path)
    assert numbers(third[:]) == [0, 1, 2, 3, 4]


def test_the_files_of_another_buffer_are_not_saved_over(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(8))
    rb.extend(items(0, 3))
    with ReplayBuffer(storage=in_place(tmp_path)) as other:
        other.extend(items(7, 8))
        for path in (tmp_path, tmp_path / "storage"):
            with pytest.raises(BufferExistsError, match="is the scratch directory of a buffer"):
                rb.dumps(path)
        with pytest.raises(BufferExistsError):
            # its own storage folder; only the parent can be a save
            other.dumps(tmp_path / "storage")
        with pytest.raises(BufferExistsError):
            rb.storage.dumps(tmp_path / "storage")
        assert numbers(other[:]) == [7]


def test_hooks_are_refused_where_the_storage_itself_lies(tmp_path: Path) -> None:
    with ReplayBuffer(storage=in_place(tmp_path)) as rb:
        rb.extend(items(0, 3))
        rb.register_save_hook(lambda data, path: data)
        with pytest.raises(RuntimeError, match=r"own files there, which .* would overwrite"):
            rb.dumps(tmp_path)
        assert os.listdir(tmp_path) == ["storage"]
        rb.dumps(tmp_path / "elsewhere")
    other = ReplayBuffer(storage=LazyTensorStorage(8))
    other.loads(tmp_path / "elsewhere")
    assert numbers(other[:]) == [0, 1, 2]


@pytest.mark.parametrize("existsok", [False, True])
def test_a_bare_directory_of_tensordict_is_taken_over_with_its_items(
    existsok: bool, tmp_path: Path
) -> None:
    storage = tmp_path / "storage"
    whole = items(0, 6)
    whole.memmap(storage)
    (storage / "storage_metadata.json").write_text('{"metadata": {}, "is_pytree": false, "len": 4}')
    (tmp_path / "writer").mkdir()
    (tmp_path / "writer" / "metadata.json").write_text('{"cursor": 4, "write_count": 4}')
    (tmp_path / "buffer_metadata.json").write_text('{"batch_size": 2}')
    with pytest.raises(ValueError, match=r"contains a storage of 6 elements.*max_size=7"):
        ReplayBuffer(storage=in_place(tmp_path, 7)).loads(tmp_path)
    with ReplayBuffer(storage=in_place(tmp_path, 6, existsok=existsok)) as rb:
        rb.loads(tmp_path)
        assert numbers(rb[:]) == [0, 1, 2, 3]
        assert rb.extend(items(9, 10)).tolist() == [4]
    assert np.fromfile(storage / "a.memmap", np.int64).tolist() == [0, 1, 2, 3, 9, 5]


# -- hooks, and checkpointers of one's own ---------------------------------------------------------


class Noting:
    """A hook that records its arguments."""

    def __init__(self) -> None:
        self.shift: Any = None
        self.is_full: Any = None
        self.calls: list[Any] = []

    def __call__(self, data: Any, path: Path | None = None) -> Any:
        self.calls.append((list(data.batch_size), self.shift, self.is_full))
        return data


@pytest.mark.parametrize(
    ("count", "shift", "is_full"), [(3, 3, False), (8, 8, True), (11, 3, True), (16, 8, True)]
)
def test_save_hooks_are_told_where_the_ring_is(
    directory: Any, count: int, shift: int, is_full: bool, tmp_path: Path
) -> None:
    collector, rb = ReplayBuffer(storage=directory(8)), ReplayBuffer(storage=directory(8))
    collector.extend(items(0, count))
    hook = Noting()
    rb.register_save_hook(hook)  # a learner that never wrote
    rb.dumps(tmp_path / "run")
    assert hook.calls == [([8], shift, is_full)]


def test_data_changed_by_save_hooks_are_saved_and_restored_by_load_hooks(
    make: MakeStorage, tmp_path: Path
) -> None:
    def halve(data: Any, path: Path) -> Any:
        assert path.is_dir()
        return TensorDict({"half": data["a"][:4] * 10}, [4])

    def double(data: Any, out: Any) -> Any:
        if out is not None:
            assert out.batch_size == torch.Size([8])
        n = data["half"] // 10
        full = torch.cat([n, n])
        c = full[:, None].repeat(1, 3).float()
        return TensorDict({"a": full, "b": {"c": c, "d": full % 2 == 0}}, [8])

    rb = ReplayBuffer(storage=make(8))
    rb.register_save_hook(halve)
    rb.extend(items(0, 6))
    rb.dumps(tmp_path / "run")
    assert np.fromfile(tmp_path / "run" / "storage" / "half.memmap", np.int64).tolist() == [
        0,
        10,
        20,
        30,
    ]
    assert not (tmp_path / "run" / "storage" / "a.memmap").exists()
    for written in (False, True):
        other = ReplayBuffer(storage=make(8))
        other.register_load_hook(double)
        if written:
            other.extend(items(50, 52))
        other.loads(tmp_path / "run")
        assert numbers(other[:]) == [0, 1, 2, 3, 0, 1]
        assert (other.write_count, ring_of(other).cursor) == (6, 6)


def test_a_pytree_that_hooks_made_is_saved_as_it_is(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    rb.extend((torch.arange(3), torch.ones(3, 2)))
    rb.register_save_hook(lambda data, path: (data[0][:2] + 5, data[1][:2]))
    rb.dumps(tmp_path)
    content = json.loads((tmp_path / "storage" / "storage_metadata.json").read_text())
    assert content["metadata"]["0"] == {"dtype": "torch.int64", "shape": [2]}
    assert np.fromfile(tmp_path / "storage" / "0.memmap", np.int64).tolist() == [5, 6]


class TextFile(StorageCheckpointerBase):
    """A user's checkpointer that follows TorchRL's protocol."""

    def dumps(self, storage: Any, path: Any) -> None:
        path.mkdir(exist_ok=True)
        (path / "items.txt").write_text(repr(storage.get(slice(None)).tolist()))

    def loads(self, storage: Any, path: Any) -> None:
        data = torch.tensor(json.loads((path / "items.txt").read_text()))
        storage.set(range(len(data)), data)


def test_a_custom_checkpointer_is_used(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4), checkpointer=TextFile())
    rb.extend(torch.arange(3))
    rb.dumps(tmp_path)
    assert (tmp_path / "storage" / "items.txt").read_text() == "[0, 1, 2]"
    other = ReplayBuffer(storage=LazyTensorStorage(4))
    other.storage.checkpointer = TextFile()
    other.loads(tmp_path)
    assert other[:].tolist() == [0, 1, 2]
    assert (other.write_count, other.writer._cursor) == (3, 3)
    weighed = PrioritizedReplayBuffer(
        alpha=0.7, beta=0.4, storage=LazyTensorStorage(4), checkpointer=TextFile()
    )
    weighed.extend(torch.arange(3))
    weighed.update_priority(torch.arange(3), torch.tensor([1.0, 5.0, 2.0]))
    weighed.dumps(tmp_path / "weighed")
    weighed.update_priority(torch.arange(3), 1.0)
    weighed.loads(tmp_path / "weighed")
    assert ring_of(weighed).tree.priorities().tolist()[:3] == [1.0, 5.0, 2.0]
    with closing(LazyMemmapStorage(4, scratch_dir=tmp_path / "x" / "storage")) as storage:
        storage.set(range(2), torch.arange(2))
        rb = ReplayBuffer(storage=storage, checkpointer=TextFile())
        with pytest.raises(RuntimeError, match="TextFile cannot save it in this directory"):
            rb.dumps(tmp_path / "x")


class CountedLoads(TensorStorageCheckpointer):
    """A subclass of our checkpointer with one method overridden."""

    count = 0

    def loads(self, storage: Any, path: Any) -> Any:
        self.count += 1
        return super().loads(storage, path)


def test_a_changed_method_of_ours_is_called_by_the_buffer(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4), checkpointer=CountedLoads())
    rb.extend(items(0, 3))
    rb.dumps(tmp_path)
    rb.loads(tmp_path)
    assert rb.storage.checkpointer.count == 1
    assert numbers(rb[:]) == [0, 1, 2]
    rb.storage.checkpointer = None
    assert type(rb.storage.checkpointer) is TensorStorageCheckpointer


class Rows(Storage):
    """A user's storage."""

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)
        self.rows: Any = None
        self.data: dict[int, Any] = {}

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        for at, row in zip(torch.as_tensor(cursor).reshape(-1).tolist(), data, strict=False):
            self.data[at] = row

    def get(self, index: Any) -> Any:
        return torch.stack([self.data[at] for at in torch.as_tensor(index).reshape(-1).tolist()])

    def __len__(self) -> int:
        return len(self.data)

    def state_dict(self) -> dict[str, Any]:
        return {"data": self.data}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.data = state_dict["data"]


class Latest(Sampler):
    """A user's sampler, with a state or with files of its own."""

    def __init__(self, files: bool) -> None:
        self.drawn = 0
        if files:
            self.__class__ = LatestInFiles

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
        self.drawn += 1
        return torch.full((batch_size,), len(storage) - 1), {}

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.drawn = state_dict["drawn"]


class LatestInFiles(Latest):
    def dumps(self, path: Any) -> None:
        (path / "drawn.txt").write_text(str(self.drawn))

    def loads(self, path: Any) -> None:
        self.drawn = int((path / "drawn.txt").read_text())


class Forwards(Writer):
    """A user's writer."""

    def __init__(self) -> None:
        self.at = 0

    def add(self, data: Any) -> Any:
        self._storage.set(self.at, data[None])
        self.at += 1
        return self.at - 1

    def extend(self, data: Any) -> Any:
        return torch.tensor([self.add(one) for one in data])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


@pytest.mark.parametrize("files", [False, True])
def test_custom_parts_are_saved_by_their_state_or_their_own_dumps(
    files: bool, tmp_path: Path
) -> None:
    def buffer() -> ReplayBuffer:
        parts: Any = {"storage": Rows(9), "sampler": Latest(files), "writer": Forwards()}
        return ReplayBuffer(**parts, batch_size=2)

    rb = buffer()
    rb.extend(torch.arange(3))
    rb.sample()
    rb.dumps(tmp_path)
    assert (tmp_path / "storage" / PARTS / "sampler" / "drawn.txt").exists() == files
    other = buffer()
    other.loads(tmp_path)
    assert other.sampler.drawn == 1
    assert other.add(torch.tensor(7)) == 3
    assert other.sample().tolist() == [7, 7]


def test_prioritized_buffers_of_both_kinds_come_back(tmp_path: Path) -> None:
    rb = PrioritizedReplayBuffer(alpha=0.7, beta=0.4, storage=LazyTensorStorage(4), batch_size=2)
    rb.extend(torch.arange(4))
    rb.update_priority(torch.arange(4), torch.tensor([0.0, 0.0, 100.0, 0.0]))
    rb.dumps(tmp_path)
    other = PrioritizedReplayBuffer(alpha=0.1, beta=0.1, storage=LazyTensorStorage(4), batch_size=2)
    other.loads(tmp_path)
    assert other.sample().tolist() == [2, 2]


def test_priorities_of_a_table_of_the_samplers_own_come_back(tmp_path: Path) -> None:
    def buffer() -> ReplayBuffer:
        sampler = PrioritizedSampler(9, 1.0, 1.0, eps=0.0)
        return ReplayBuffer(storage=Rows(9), sampler=sampler, batch_size=3)

    rb = buffer()
    rb.extend(torch.arange(3))
    rb.update_priority(torch.arange(3), torch.tensor([0.0, 5.0, 0.0]))
    rb.dumps(tmp_path)
    other = buffer()
    other.loads(tmp_path)
    assert other.sample().tolist() == [1, 1, 1]
    assert other.sampler.default_priority == 5.0


def test_a_load_gathers_no_more_than_some_megabytes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rb = ReplayBuffer(storage=LazyMemmapStorage(20))
    rb.extend(items(0, 20))
    rb.dumps(tmp_path)
    monkeypatch.setattr(tensor_rows, "PIECE_BYTES", 3 * (8 + 12 + 1) + 1)
    at_once: list[int] = []
    replace_some = tensor_rows.Rows._replace_some

    def counted(self: Any, columns: Any, rows: Any, slots: Any, *whose: Any) -> None:
        at_once.append(len(slots))
        replace_some(self, columns, rows, slots, *whose)

    monkeypatch.setattr(tensor_rows.Rows, "_replace_some", counted)
    other = ReplayBuffer(storage=LazyMemmapStorage(20))
    other.loads(tmp_path)
    assert at_once == [3] * 6 + [2]
    assert numbers(other[:]) == list(range(20))


def test_a_tensorclass_leaves_no_files_but_those_of_tensordict(tmp_path: Path) -> None:
    pair = Transition(obs=torch.arange(4), reward=torch.ones(4, 0), batch_size=[4])
    rb = ReplayBuffer(storage=LazyTensorStorage(6))
    rb.extend(TensorDict({"pair": pair}, [4]))
    rb.dumps(tmp_path, layout="torchrl")
    files = {
        str(file.relative_to(tmp_path / "storage/pair")) for file in tmp_path.rglob("pair/**/*")
    }
    inner = {f"_tensordict/{name}" for name in ("obs.memmap", "reward.memmap", "meta.json")}
    assert files == {"meta.json", "_tensordict", *inner}
    known = TensorDict.load_memmap(tmp_path / "storage")
    assert type(known["pair"]) is Transition
    assert known["pair"].obs[:4].tolist() == [0, 1, 2, 3]


def test_items_with_a_lazy_stack_in_them_come_back(tmp_path: Path) -> None:
    parts = [TensorDict(a=torch.arange(4 * n).view(4, n), batch_size=[4]) for n in (2, 3)]
    data = TensorDict({"stack": lazy_stack(parts, 1), "b": torch.zeros(4)}, [4])
    rb = ReplayBuffer(storage=LazyTensorStorage(6))
    rb.extend(data)
    rb.dumps(tmp_path)
    other = ReplayBuffer(storage=LazyTensorStorage(6))
    other.loads(tmp_path)
    found = other[:]["stack"]
    assert found.stack_dim == 1
    assert [part["a"].tolist() for part in found.tensordicts] == [
        part["a"].tolist() for part in parts
    ]
    rb.dumps(tmp_path / "theirs", layout="torchrl")
    theirs = TensorDict.load_memmap(tmp_path / "theirs" / "storage")["stack"]
    assert [tuple(part["a"].shape) for part in theirs.tensordicts] == [(6, 2), (6, 3)]
    whole = dict(read_folder(tmp_path / "theirs" / "storage").node.to_json()["items"])
    assert whole == dict(rb.storage.mover().leaves.node.to_json()["items"])


def test_an_interrupt_that_numpy_swallows_is_not_taken_for_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C becomes this TypeError while numpy checks whether an open file is a path."""

    def swallows(*_: object, **__: object) -> None:
        raise TypeError("expected str, bytes or os.PathLike object, not BufferedReader")

    rb = ReplayBuffer(storage=ListStorage(4), batch_size=1)
    rb.extend([1, 2, 3])
    rb.dumps(tmp_path / "save")
    monkeypatch.setattr(np, "fromfile", swallows)
    loaded = ReplayBuffer(storage=ListStorage(4), batch_size=1)
    loaded.loads(tmp_path / "save")
    assert list(loaded[:]) == [1, 2, 3]


def test_a_storage_that_may_use_what_exists_continues_in_a_save(tmp_path: Path) -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4))
    rb.extend(TensorDict({"a": torch.arange(3)}, [3]))
    rb.dumps(tmp_path)
    place = tmp_path / "storage"
    with pytest.raises(BufferExistsError, match="already contains a buffer"):
        TensorDictReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=place)).extend(rb[:])
    storage = LazyMemmapStorage(4, scratch_dir=place, shared_init=True)
    with TensorDictReplayBuffer(storage=storage) as continued:
        continued.extend(TensorDict({"a": torch.tensor([3])}, [1]))
        rb.loads(tmp_path)  # the save of the current live buffer
    assert rb[:]["a"].tolist() == [0, 1, 2, 3]


def test_an_ensemble_is_not_saved_over_the_files_of_its_buffers(tmp_path: Path) -> None:
    scratch = tmp_path / "storage" / "0"
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=scratch), batch_size=2)
    rb.extend(TensorDict({"a": torch.arange(3)}, [3]))
    with pytest.raises(RuntimeError, match="contains the files of storage 0 of the ensemble"):
        ReplayBufferEnsemble(rb, batch_size=2).dumps(tmp_path)
    assert rb[:]["a"].tolist() == [0, 1, 2]
