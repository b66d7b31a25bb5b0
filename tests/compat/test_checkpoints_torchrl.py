"""Checkpoints load in both directions between TorchRL and shmbuffer: items, order, priorities."""

from __future__ import annotations

import json
import logging
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.compat.family import ours, theirs
from tests.kit.items import Transition, Trap

# TorchRL and tensordict warn about deprecations while they save and load.
pytestmark = pytest.mark.filterwarnings("default")

FAMILIES = {"ours": ours, "theirs": theirs}
WAYS = [("ours", "theirs"), ("theirs", "ours")]
both_ways = pytest.mark.parametrize(
    ("source", "target"), WAYS, ids=["ours to theirs", "theirs to ours"]
)


def items(first: int, stop: int) -> TensorDict:
    n = torch.arange(first, stop)
    return TensorDict(
        {
            "obs": n.unsqueeze(-1) * torch.tensor([1.0, 0.5, 0.25]),
            "next": {"obs": (n + 1).to(torch.bfloat16), "done": n % 3 == 2},
            "a key / with %": n.to(torch.int16),
        },
        [len(n)],
    )


def as_tensorclass(first: int, stop: int) -> Any:
    n = torch.arange(first, stop)
    return Transition(obs=n.float(), reward=n * 2, batch_size=[len(n)])


def as_tensor(first: int, stop: int) -> torch.Tensor:
    return torch.arange(first, stop).unsqueeze(-1) * torch.tensor([1, 10])


def as_pytree(first: int, stop: int) -> Any:
    n = torch.arange(first, stop)
    return n.float(), {"x": n * 2, "y": [n * 3, (n * 4.0,)]}


def plain(data: Any) -> Any:
    if hasattr(data, "to_tensordict"):
        data = data.to_tensordict()
    if hasattr(data, "items"):
        return {key: plain(value) for key, value in data.items() if key != "index"}
    if isinstance(data, (tuple, list)):
        return [plain(part) for part in data]
    if isinstance(data, torch.Tensor):
        return data.dtype, data.float().tolist()
    return data


def quietly(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args, **options)


def save(buffer: Any, path: Path) -> None:
    """Saves a buffer of either library in TorchRL's layout."""
    is_ours = type(buffer).__module__.startswith("shmbuffer")
    quietly(buffer.dumps, path, **({"layout": "torchrl"} if is_ours else {}))


def buffer(family: str, storage: str, capacity: int = 6, **options: Any) -> Any:
    library = FAMILIES[family]
    cls = options.pop("cls", "TensorDictReplayBuffer")
    parts = {
        name: getattr(library, options.pop(name)[0])(*made[1:])
        for name in ("sampler", "writer")
        if (made := options.get(name)) is not None
    }
    ndim = {"ndim": options.pop("ndim")} if "ndim" in options else {}
    made_storage = getattr(library, storage)(capacity, **ndim)
    return getattr(library, cls)(storage=made_storage, **parts, **{"batch_size": 2, **options})


@both_ways
@pytest.mark.parametrize("storage", ["LazyTensorStorage", "LazyMemmapStorage"])
@pytest.mark.parametrize("count", [4, 6, 9], ids=["partly full", "full", "gone round"])
def test_items_places_cursor_and_count_cross(
    source: str, target: str, storage: str, count: int, tmp_path: Path
) -> None:
    saved = buffer(source, storage)
    saved.extend(items(0, count))
    save(saved, tmp_path)
    loaded = buffer(target, storage, batch_size=3)
    quietly(loaded.loads, tmp_path)
    assert plain(loaded[:]) == plain(saved[:])
    assert len(loaded) == len(saved) == min(count, 6)
    assert loaded.write_count == saved.write_count == count
    assert loaded._batch_size == 2
    for one in (saved, loaded):  # both continue at the same slot
        one.extend(items(100, 103))
        one.add(items(200, 201)[0])
    assert plain(loaded[:]) == plain(saved[:])
    assert set(loaded.sample().keys()) >= {"obs", "next", "index"}


@both_ways
@pytest.mark.parametrize(
    ("make", "cls"),
    [
        (items, "ReplayBuffer"),
        (as_tensorclass, "ReplayBuffer"),
        (as_tensor, "ReplayBuffer"),
        (as_pytree, "ReplayBuffer"),
    ],
    ids=["tensordict", "tensorclass", "tensor", "pytree"],
)
@pytest.mark.parametrize("written", [True, False], ids=["into a used one", "into a fresh one"])
def test_every_form_of_data_crosses(
    source: str, target: str, make: Any, cls: str, written: bool, tmp_path: Path
) -> None:
    saved = buffer(source, "LazyTensorStorage", cls=cls)
    saved.extend(make(0, 8))
    save(saved, tmp_path)
    loaded = buffer(target, "LazyTensorStorage", cls=cls)
    if written:
        loaded.extend(make(50, 55))
    elif target == "theirs" and make in (as_tensor, as_pytree):
        with pytest.raises(RuntimeError, match="non-initialized"):  # TorchRL cannot load it
            quietly(loaded.loads, tmp_path)
        return
    elif make is as_pytree:
        # No file of TorchRL's has the structure.
        with pytest.raises(RuntimeError, match="TorchRL did not save"):
            loaded.loads(tmp_path)
        return
    quietly(loaded.loads, tmp_path)
    assert plain(loaded[:]) == plain(saved[:])
    if make is as_tensorclass:
        assert type(loaded[:]) is Transition
    for one in (saved, loaded):
        one.extend(make(100, 103))
    assert plain(loaded[:]) == plain(saved[:])


@both_ways
def test_a_storage_over_the_callers_tensors_crosses(
    source: str, target: str, tmp_path: Path
) -> None:
    def make(family: str, data: TensorDict) -> Any:
        library = FAMILIES[family]
        return library.ReplayBuffer(storage=library.TensorStorage(data), batch_size=2)

    saved = make(source, items(0, 5))
    save(saved, tmp_path)
    loaded = make(target, items(50, 55))
    quietly(loaded.loads, tmp_path)
    assert plain(loaded[:]) == plain(items(0, 5))


@both_ways
@pytest.mark.parametrize("count", [3, 4, 6], ids=["partly full", "full", "gone round"])
def test_several_dimensions_cross(source: str, target: str, count: int, tmp_path: Path) -> None:
    def batch(first: int, steps: int) -> TensorDict:
        n = torch.arange(first, first + 2 * steps).reshape(2, steps)
        return TensorDict({"a": n, "b": {"c": n.unsqueeze(-1).float()}}, [2, steps])

    saved = buffer(source, "LazyTensorStorage", 8, ndim=2, cls="ReplayBuffer")
    saved.extend(batch(0, count))
    save(saved, tmp_path)
    pytrees = [
        buffer(one, "LazyTensorStorage", 8, ndim=2, cls="ReplayBuffer") for one in (source, target)
    ]
    pytrees[0].extend((batch(0, count)["a"],))
    save(pytrees[0], tmp_path / "pytree")
    pytrees[1].extend((batch(0, 1)["a"],))
    quietly(pytrees[1].loads, tmp_path / "pytree")
    assert plain(pytrees[1][:]) == plain(pytrees[0][:])
    loaded = buffer(target, "LazyTensorStorage", 8, ndim=2, cls="ReplayBuffer")
    quietly(loaded.loads, tmp_path)
    assert plain(loaded[:]) == plain(saved[:])
    assert len(loaded) == len(saved)
    for one in (saved, loaded):
        one.extend(batch(100, 1))
    assert plain(loaded[:]) == plain(saved[:])
    for one in (saved, loaded):  # TorchRL counts rows, shmbuffer counts elements
        assert one.write_count == (count + 1) * (2 if isinstance(one, ours.ReplayBuffer) else 1)


@both_ways
def test_items_with_dimensions_of_their_own_cross(source: str, target: str, tmp_path: Path) -> None:
    n = torch.arange(15).view(5, 3)
    for name, data in {
        "trajectories": TensorDict({"a": n, "b": {"c": n.unsqueeze(-1).float()}}, [5, 3]),
        "tensor": n,
    }.items():
        saved = buffer(source, "LazyTensorStorage", cls="ReplayBuffer")
        saved.extend(data)
        save(saved, tmp_path / name)
        loaded = buffer(target, "LazyTensorStorage", cls="ReplayBuffer")
        if name == "tensor":
            loaded.extend(data[:1] * 0)
        quietly(loaded.loads, tmp_path / name)
        assert plain(loaded[:]) == plain(data)
        assert len(loaded) == 5
        if name == "trajectories":
            assert loaded[:].batch_size == torch.Size([5, 3])


@both_ways
@pytest.mark.parametrize("alpha", [0.7, 1.0, 0.0])
def test_priorities_cross(source: str, target: str, alpha: float, tmp_path: Path) -> None:
    options: dict[str, Any] = {"sampler": ("PrioritizedSampler", 6, alpha, 0.4)}
    saved = buffer(source, "LazyTensorStorage", **options)
    saved.extend(items(0, 5))
    given = torch.tensor([3.0, 0.5, 0.001, 2.0])
    saved.update_priority(torch.tensor([0, 1, 2, 3]), given)
    saved.update_priority(torch.tensor([0]), torch.tensor([1.5]))
    save(saved, tmp_path)

    options = {"sampler": ("PrioritizedSampler", 6, 0.3, 0.1)}
    loaded = buffer(target, "LazyTensorStorage", **options)
    quietly(loaded.loads, tmp_path)
    sampler = loaded.sampler
    assert (float(sampler.alpha), float(sampler.beta)) == (alpha, 0.4)
    assert float(sampler.default_priority) == pytest.approx(3.0, rel=1e-6)
    mass = np.array([1.5, 0.5, 0.001, 2.0, 1.0]) ** alpha
    found = [float(sampler._sum_tree[at]) for at in range(6)]
    assert found == pytest.approx([*mass, 0.0], rel=1e-4)
    if target == "ours" and alpha:
        raw = sampler.ring().tree.priorities()[:5]
        assert raw == pytest.approx([1.5, 0.5, 0.001, 2.0, 1.0], rel=1e-4)
    _, info = loaded.sample(400, return_info=True)
    share = np.bincount(np.asarray(info["index"]).ravel(), minlength=6)[:5] / 400
    assert share == pytest.approx(mass / mass.sum(), abs=0.1)
    weight = torch.as_tensor(info["priority_weight"]).double()
    expected = (mass / mass.min()) ** -0.4
    assert weight.numpy() == pytest.approx(expected[np.asarray(info["index"]).ravel()], rel=1e-4)
    # A new item has the largest priority that was ever set.
    loaded.extend(items(100, 101))
    assert float(sampler._sum_tree[5]) == pytest.approx(3.0**alpha, rel=1e-5)


@both_ways
@pytest.mark.parametrize("drawn", [0, 1, 2])
def test_a_pass_without_replacement_goes_on_where_it_was(
    source: str, target: str, drawn: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"sampler": ("SamplerWithoutReplacement",)}
    saved = buffer(source, "LazyTensorStorage", **options)
    saved.extend(items(0, 6))
    seen = [int(one) for _ in range(drawn) for one in saved.sample()["index"]]
    save(saved, tmp_path)
    loaded = buffer(target, "LazyTensorStorage", **options)
    quietly(loaded.loads, tmp_path)
    rest = [int(one) for _ in range(3 - drawn) for one in loaded.sample()["index"]]
    assert sorted(seen + rest) == list(range(6))


@both_ways
def test_the_generator_crosses(source: str, target: str, tmp_path: Path) -> None:
    saved = buffer(source, "LazyTensorStorage", generator=torch.Generator().manual_seed(7))
    saved.extend(items(0, 6))
    saved.sample()
    save(saved, tmp_path)
    loaded = buffer(target, "LazyTensorStorage")
    quietly(loaded.loads, tmp_path)
    mine, other = (getattr(one, "_rng", None) or one.generator for one in (saved, loaded))
    assert torch.equal(mine.get_state(), other.get_state())


@both_ways
def test_the_state_of_transforms_crosses(source: str, target: str, tmp_path: Path) -> None:
    from torchrl.envs.transforms import Compose, ObservationNorm

    def make(family: str, loc: float, chain: bool) -> Any:
        norm = ObservationNorm(loc=loc, scale=2.0, in_keys=["x"], standard_normal=False)
        transform = Compose(norm) if chain else norm
        one = buffer(family, "LazyTensorStorage", transform=transform)
        one.extend(TensorDict({"x": torch.ones(3, 1)}, [3]))
        return one

    for chain in (False, True):
        save(make(source, 5.0, chain), tmp_path)
        loaded = make(target, 1.0, chain)
        quietly(loaded.loads, tmp_path)
        assert loaded.sample()["x"].tolist() == [[7.0], [7.0]]


@both_ways
def test_a_writer_of_the_best_items_crosses(source: str, target: str, tmp_path: Path) -> None:
    def ranked(*scores: float) -> TensorDict:
        return TensorDict({"score": torch.tensor(scores)}, [len(scores)])

    options: dict[str, Any] = {"writer": ("TensorDictMaxValueWriter", "score")}
    saved = buffer(source, "LazyTensorStorage", 3, **options)
    saved.extend(ranked(3.0, 1.0, 5.0, 2.0))
    save(saved, tmp_path)
    loaded = buffer(target, "LazyTensorStorage", 3, **options)
    quietly(loaded.loads, tmp_path)
    for one in (saved, loaded):
        one.extend(ranked(0.5, 4.0))
        assert sorted(one[:]["score"].tolist()) == [3.0, 4.0, 5.0]
    assert plain(loaded[:]) == plain(saved[:])


def test_text_crosses_as_far_as_torchrl_itself_loads_it(tmp_path: Path) -> None:
    data = TensorDict({"a": torch.arange(4)}, [4])
    data["text"] = texts = ["zero", "one", "two", "three"]
    saved = buffer("theirs", "LazyTensorStorage", cls="ReplayBuffer")
    saved.extend(data)
    save(saved, tmp_path / "theirs")
    loaded = buffer("ours", "LazyTensorStorage", cls="ReplayBuffer")
    loaded.loads(tmp_path / "theirs")
    assert loaded[:]["a"].tolist() == [0, 1, 2, 3]
    assert list(loaded[:]["text"]) == texts
    save(loaded, tmp_path / "ours")
    files = quietly(TensorDict.load_memmap, tmp_path / "ours" / "storage")
    assert list(files[:4]["text"]) == texts
    # TorchRL gives every item the text of the first one, also in its own checkpoints.
    for name in ("ours", "theirs"):
        again = buffer("theirs", "LazyTensorStorage", cls="ReplayBuffer")
        quietly(again.loads, tmp_path / name)
        assert again[:]["a"].tolist() == [0, 1, 2, 3]
        assert list(again[:]["text"]) == ["zero"] * 4


def test_compressed_items_of_torchrl_load_here(tmp_path: Path) -> None:
    saved = theirs.ReplayBuffer(storage=theirs.CompressedListStorage(6), batch_size=2)
    saved.extend(
        [
            TensorDict({"a": torch.arange(10.0) + n, "b": torch.full((2, 3), n), "text": f"{n}"})
            for n in range(3)
        ]
    )
    saved.add(torch.arange(5, dtype=torch.int32))
    save(saved, tmp_path)
    loaded = ours.ReplayBuffer(storage=ours.CompressedListStorage(6), batch_size=2)
    loaded.loads(tmp_path)
    assert len(loaded) == 4
    for n in range(3):
        item = loaded.storage.get(n)
        assert item["a"].tolist() == [float(n + k) for k in range(10)]
        assert item["b"].tolist() == [[n] * 3] * 2
        assert item["text"] == f"{n}"
    assert torch.equal(loaded.storage.get(3), torch.arange(5, dtype=torch.int32))
    assert loaded.add(torch.zeros(1)) == 4
    assert loaded.write_count == 5


def test_an_ensemble_of_storages_crosses(tmp_path: Path) -> None:
    for source, target in WAYS:
        for name in (source, target):
            assert FAMILIES[name].StorageEnsemble

        def make(family: str) -> tuple[Any, list[Any]]:
            library = FAMILIES[family]
            buffers = [
                library.TensorDictReplayBuffer(storage=library.LazyTensorStorage(5), batch_size=2)
                for _ in range(2)
            ]
            return library.ReplayBufferEnsemble(*buffers, batch_size=4), buffers

        saved, parts = make(source)
        for number, part in enumerate(parts):
            part.extend(items(10 * number, 10 * number + 3 + 4 * number))
        save(saved, tmp_path / source)
        loaded, others = make(target)
        quietly(loaded.loads, tmp_path / source)
        for part, other in zip(parts, others, strict=True):
            assert plain(other[:]) == plain(part[:])
            for one in (part, other):
                one.extend(items(50, 52))
            assert plain(other[:]) == plain(part[:])


def test_files_of_an_older_torchrl_load(tmp_path: Path) -> None:
    saved = buffer("theirs", "LazyTensorStorage", sampler=("PrioritizedSampler", 6, 0.7, 0.4))
    saved.extend(items(0, 9))
    save(saved, tmp_path)
    # Files that releases up to 0.13.3 did not write.
    (tmp_path / "prefetch.pkl").unlink()
    for name, keys in {
        "writer/metadata.json": ["write_count"],
        "sampler/sampler_metadata.json": ["_schema_version"],
        "buffer_metadata.json": ["consume_after_n_samples"],
    }.items():
        content = json.loads((tmp_path / name).read_text())
        for key in keys:
            del content[key]
        (tmp_path / name).write_text(json.dumps(content))
    loaded = buffer("ours", "LazyTensorStorage", sampler=("PrioritizedSampler", 6, 0.1, 0.1))
    loaded.loads(tmp_path)
    assert plain(loaded[:]) == plain(saved[:])
    assert loaded.write_count == 6  # the number of items, because no file has the count
    assert loaded.extend(items(20, 21)).tolist() == [3]
    assert loaded.sampler.alpha == 0.7


def test_batches_made_ahead_are_never_unpickled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = buffer("theirs", "LazyTensorStorage")
    saved.extend(items(0, 4))
    save(saved, tmp_path / "saved")
    (tmp_path / "saved" / "prefetch.pkl").write_bytes(pickle.dumps(Trap(tmp_path / "trapped")))
    loaded = buffer("ours", "LazyTensorStorage")
    with caplog.at_level(logging.INFO):
        loaded.loads(tmp_path / "saved")
    assert plain(loaded[:]) == plain(saved[:])
    assert not (tmp_path / "trapped").exists()
    assert "prefetch.pkl" in caplog.text
    with pytest.raises(ours.BufferExistsError, match="does not belong to a save"):
        loaded.dumps(tmp_path / "saved")


@pytest.mark.parametrize("layout", ["shmbuffer", "torchrl"])
def test_a_save_by_torchrl_over_one_of_ours_is_torchrls(layout: str, tmp_path: Path) -> None:
    first = buffer("ours", "LazyTensorStorage", sampler=("PrioritizedSampler", 6, 0.7, 0.4))
    first.extend(items(0, 8))
    first.dumps(tmp_path, layout=layout)
    second = buffer("theirs", "LazyTensorStorage", sampler=("PrioritizedSampler", 6, 0.7, 0.4))
    second.extend(items(20, 27))
    second.update_priority(torch.tensor([0]), torch.tensor([9.0]))
    save(second, tmp_path)
    loaded = buffer("ours", "LazyTensorStorage", sampler=("PrioritizedSampler", 6, 0.7, 0.4))
    loaded.loads(tmp_path)
    assert plain(loaded[:]) == plain(second[:])
    assert loaded.extend(items(50, 51)).tolist() == [1]
    assert loaded.sampler.ring().tree.priorities()[0] == pytest.approx(9.0, rel=1e-5)


def test_a_directory_of_torchrl_is_taken_over_where_it_is(tmp_path: Path) -> None:
    scratch = tmp_path / "storage"
    storage = theirs.LazyMemmapStorage(6, scratch_dir=scratch)
    saved = theirs.TensorDictReplayBuffer(storage=storage, batch_size=2)
    saved.extend(items(0, 9))
    save(saved, tmp_path)
    expected = plain(saved[:])
    mine = ours.LazyMemmapStorage(6, scratch_dir=scratch)
    with ours.TensorDictReplayBuffer(storage=mine, batch_size=2) as loaded:
        loaded.loads(tmp_path)
        assert plain(loaded[:]) == expected
        assert loaded.write_count == 9
        assert loaded.extend(items(30, 31)).tolist() == [3]
        file = np.fromfile(scratch / "a%20key%20%2F%20with%20%25.memmap", np.int16)
        assert file.tolist() == [6, 7, 8, 30, 4, 5]
    with pytest.raises(ValueError, match="max_size=7"):
        _load_in_place_with(7, tmp_path)


def _load_in_place_with(capacity: int, path: Path) -> None:
    other = path / "other"
    saved = theirs.TensorDictReplayBuffer(
        storage=theirs.LazyMemmapStorage(6, scratch_dir=other / "storage"), batch_size=2
    )
    other.mkdir(exist_ok=True)
    saved.extend(items(0, 4))
    save(saved, other)
    storage = ours.LazyMemmapStorage(capacity, scratch_dir=other / "storage")
    ours.TensorDictReplayBuffer(storage=storage).loads(other)
