"""Each supported dtype is read, indexed, sampled and exported; the others are refused by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import shmbuffer
from shmbuffer import (
    CompressedListStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SchemaMismatchError,
    SliceSampler,
    TED2Flat,
    TED2Nested,
    TensorDictReplayBuffer,
)
from shmbuffer.memory.format.dtypes import DTYPES

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch warns about complex32

COUNT = 12
FLOAT8 = sorted(name for name in DTYPES if name.startswith("float8"))
STORAGES: dict[str, Any] = {
    "tensor": LazyTensorStorage,
    "list": ListStorage,
    "stack": LazyStackStorage,
    "compressed": CompressedListStorage,
    "records": lambda size: LazyStackStorage(size, shared_init=True, max_bytes=2**20),
}


def numbers(dtype: str, values: torch.Tensor) -> torch.Tensor:
    return values.float().to(getattr(torch, dtype))


def episodes(dtype: str) -> TensorDict:
    """Makes three trajectories of four steps whose ends and ids have this dtype."""
    step = torch.arange(COUNT)
    return TensorDict(
        {"id": step, "end": numbers(dtype, step % 4 == 3), "episode": numbers(dtype, step // 4)},
        [COUNT],
    )


@pytest.mark.product(few=10)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("key", ["end_key", "traj_key"])
def test_trajectories_are_found_by_entries_of_each_dtype(
    storage: str, dtype: str, key: str
) -> None:
    if (key, dtype) == ("traj_key", "bool"):
        pytest.skip("a bool cannot count three trajectories")
    entry = {"end_key": "end", "traj_key": "episode"}[key]
    sampler = SliceSampler(slice_len=4, **{key: entry})
    rb = TensorDictReplayBuffer(storage=STORAGES[storage](COUNT), sampler=sampler, batch_size=40)
    rb.extend(episodes(dtype))
    drawn = rb.sample()["id"].reshape(-1, 4)
    assert set(map(tuple, drawn.tolist())) <= {(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", ["ends", "trajectories"])
def test_trajectories_are_given_in_each_dtype(dtype: str, given: str) -> None:
    if (given, dtype) == ("trajectories", "bool"):
        pytest.skip("a bool cannot count three trajectories")
    data = episodes(dtype)
    entry = {"ends": "end", "trajectories": "episode"}[given]
    sampler = SliceSampler(slice_len=4, cache_values=True, **{given: data[entry]})
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(COUNT), sampler=sampler, batch_size=40)
    rb.extend(data)
    drawn = rb.sample()["id"].reshape(-1, 4)
    assert set(map(tuple, drawn.tolist())) <= {(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)}


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "bool"])
@pytest.mark.parametrize("number", [1, [1, 0]])
def test_plain_numbers_take_each_dtype_that_holds_them(dtype: str, number: Any) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    rb.extend({"x": numbers(dtype, torch.zeros(2))})
    write = rb.extend if isinstance(number, list) else rb.add
    write({"x": number})
    assert rb[:]["x"][2:].to(torch.complex64).tolist() == [1, 0][: len(rb) - 2]


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("number", [1e6, -1e6, float("inf")])
def test_a_number_too_large_for_a_float8_is_refused_by_name(dtype: str, number: float) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    rb.extend({"x": numbers(dtype, torch.zeros(2))})
    if dtype == "float8_e5m2" and number == float("inf"):  # this dtype has infinity
        rb.add({"x": number})
        assert rb[2]["x"].item() == number
        return
    with pytest.raises(SchemaMismatchError, match=rf"leaf 'x' is {dtype}\[\], but this write has"):
        rb.add({"x": number})
    assert len(rb) == 2


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "bool"])
@pytest.mark.parametrize("storage", ["tensor", "records"])
@pytest.mark.parametrize("plain", [False, True])
def test_versions_of_each_dtype_are_compared(storage: str, dtype: str, plain: bool) -> None:
    if DTYPES[dtype].array.kind == "c" or dtype == "complex32":
        pytest.skip("complex numbers have no order")
    options = {} if storage == "tensor" else {"max_bytes": 2**20}
    kind = {"tensor": LazyTensorStorage, "records": LazyStackStorage}[storage]
    rb = TensorDictReplayBuffer(storage=kind(4, shared_init=True, **options), batch_size=4)
    rb.extend(TensorDict({"x": torch.zeros(4), "v": numbers(dtype, torch.arange(4))}, [4]))
    tickets = rb.storage.tickets(torch.arange(4))
    version: Any = 2 if plain else numbers(dtype, torch.full((4,), 2))
    done = rb.update_if_present(
        index=torch.arange(4),
        generation=tickets,
        patch=TensorDict({"x": torch.ones(4)}, [4]),
        version_key="v",
        version=version,
        require_newer=True,
    )
    assert done.updated.tolist() == [True, True, False, False]
    assert [int(item["v"].float()) for item in (rb[at] for at in range(4))] == [2, 2, 2, 3]


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("kind", ["FlatStorageCheckpointer", "NestedStorageCheckpointer"])
def test_a_save_that_could_not_be_loaded_is_refused_by_name(
    tmp_path: Path, kind: str, dtype: str
) -> None:
    done = torch.arange(COUNT).eq(COUNT - 1)[:, None]
    data = TensorDict({"x": numbers(dtype, torch.zeros(COUNT)), "next": {"done": done}}, [COUNT])
    hook = {"FlatStorageCheckpointer": TED2Flat, "NestedStorageCheckpointer": TED2Nested}[kind]
    with pytest.raises(TypeError, match=rf"{hook.__name__}: 'x' is {dtype}, which .*load_memmap "):
        hook()(data, tmp_path / "files")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(COUNT))
    rb.storage.checkpointer = getattr(shmbuffer, kind)()
    rb.extend(data)
    with pytest.raises(TypeError, match=rf"'x' is {dtype}, .* use a TensorStorageCheckpointer"):
        rb.dumps(tmp_path / "save")
    assert not list(tmp_path.iterdir())


FICTITIOUS = """
from shmbuffer.memory.format.dtypes import DTYPES, DType
# Torch has the first one, and no list in the package names it. Nobody has the second.
new, other = "float8_e8m0fnu", "float12_fictitious"
assert new not in DTYPES and other not in DTYPES
DTYPES[new] = DType(
    new, bits="uint8", numbers="float32", arrow="uint8", assigned="uint8", tensordict=False
)
DTYPES[other] = DType(other, bits="uint16")
import sys
from pathlib import Path
import numpy as np, torch
from tensordict import TensorDict
import shmbuffer
import shmbuffer.numpy
from shmbuffer.torchrl import *
from shmbuffer.saves.export import export

def refused(error, match, call, *args):
    try:
        call(*args)
    except error as found:
        assert match in str(found), found
    else:
        raise AssertionError(f"{call} accepted {match}")

def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()

folder, dtype = Path(sys.argv[1]), getattr(torch, new)
step = torch.arange(12)
x = torch.arange(1, 13, dtype=torch.uint8).view(dtype)  # powers of 2
data = TensorDict({
    "x": x, "y": x[:, None].expand(12, 3).clone(), "id": step,
    "episode": torch.tensor([1.0, 2.0, 4.0]).repeat_interleave(4).to(dtype),
    "next": {"done": (step == 11)[:, None]},
}, [12])
storages = {
    "tensor": LazyTensorStorage(12),
    "shared": LazyTensorStorage(12, shared_init=True),
    "list": ListStorage(12),
    "compressed": CompressedListStorage(12),
    "records": LazyStackStorage(12, shared_init=True, max_bytes=2**20),
}
for name, storage in storages.items():
    sampler = SliceSampler(slice_len=4, traj_key="episode")
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=8)
    rb.extend(data)
    for drawn in rb.sample().reshape(-1, 4):
        assert drawn["id"][0] % 4 == 0
        assert bits(drawn["x"]) == bits(x[drawn["id"]])
    rb[torch.tensor([0, 1])] = data[:2]
    assert [bits(rb[at]["x"])[0] for at in range(12)] == bits(x)
    rb.dumps(folder / name)
    rb.empty()
    rb.loads(folder / name)
    assert [bits(rb[at]["x"])[0] for at in range(12)] == bits(x)

rb = TensorDictReplayBuffer(storage=LazyTensorStorage(12))
rb.extend(data)
export(rb.storage, folder / "a.parquet", "parquet")
again = TensorDictReplayBuffer.from_parquet(folder / "a.parquet")[:]
assert again["x"].dtype is dtype
assert bits(again["x"]) == bits(x)
assert bits(again["y"]) == bits(data["y"])
for kind in ("hdf5", "tensordict"):
    refused(TypeError, f"is {new}, which", export, rb.storage, folder / kind, kind)
for kind in (FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer):
    rb.storage.checkpointer = kind()
    refused(TypeError, f"is {new}, which", rb.dumps, folder / kind.__name__)

with Coordinator(folder / "both", capacity=12) as coordinator:
    arrays = shmbuffer.numpy.attach(folder / "both", dtypes={"x": new})
    arrays.extend({"x": np.arange(1, 13, dtype=np.uint8)})
    assert bits(coordinator.buffer[:]["x"]) == bits(x) and coordinator.buffer[:]["x"].dtype is dtype
    assert arrays.sample(4)["x"].dtype == np.uint8
    coordinator.buffer.publish({"w": x}, 1)
    assert arrays.newest().state_dict["w"].tolist() == bits(x)
    arrays.publish({"w": np.arange(12, dtype=np.uint8)}, 2)
    assert coordinator.buffer.newest().state_dict["w"].dtype is dtype
    arrays.close()

with Coordinator(folder / "other", capacity=12) as coordinator:
    arrays = shmbuffer.numpy.attach(folder / "other", dtypes={"x": other})
    arrays.extend({"x": np.arange(12, dtype=np.uint16)})
    assert arrays.sample(4)["x"].dtype == np.uint16
    refused(SchemaMismatchError, repr(other), lambda: coordinator.buffer[:])
    arrays.close()
print("all was handled, or refused by name")
"""


def test_a_dtype_that_is_added_to_the_table_is_handled_or_refused_everywhere(
    tmp_path: Path,
) -> None:
    pytest.importorskip("h5py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FICTITIOUS, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "all was handled, or refused by name\n", done.stderr


def test_the_documentation_has_each_dtype_of_the_table() -> None:
    text = (Path(__file__).parents[2] / "docs/api/storages.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    told = {name: columns[1:] for columns in rows[1:] for name in columns[0].split(", ")}
    answer = {True: "yes", False: "no"}
    assert told == {
        name: [
            known.bits or "the same",
            f"pairs of {known.arrow}" if "complex" in name else known.arrow or "the same",
            answer[known.in_hdf5],
            answer[known.tensordict],
        ]
        for name, known in DTYPES.items()
    }
