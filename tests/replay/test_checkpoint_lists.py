"""Lists of objects are saved without pickle, each item in its place."""

from __future__ import annotations

import json
import os
import pickle
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import (
    NonTensorStack,
    TensorDict,
    lazy_stack,
)

from shmbuffer import (
    CompressedListStorage,
    CorruptBufferError,
    FormatError,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ListStorageCheckpointer,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerEnsemble,
    StorageEnsemble,
    TensorDictReplayBuffer,
    WriterEnsemble,
)
from shmbuffer._native import _core
from shmbuffer.memory.format.layout import PRIVATE
from shmbuffer.saves.values import ValueRefusedError, read_values, write_values
from tests.kit.items import Point, Step, Trap, alike
from tests.kit.rings import ring_of

pytestmark = pytest.mark.product(few=4)


class Thing:
    """An object that only pickle can save."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and other.number == self.number

    __hash__ = None  # type: ignore[assignment]


VALUES: list[Any] = [
    1,
    -(10**30),
    2.5,
    float("nan"),
    float("-inf"),
    True,
    None,
    "text \ud800 with half a pair",
    "",
    b"\0bytes",
    b"",
    1 - 2j,
    [1, (2, [3, {}])],
    {"a": torch.arange(3), 3: "x", (1, "y"): 2, None: [], 2.5: (), True: 0},
    OrderedDict(b=1, a=2),
    Point(1, torch.ones(2)),
    torch.Size([1, 2]),
    torch.float16,
    torch.device("cpu"),
    torch.tensor(5),
    torch.zeros(0, 3),
    torch.rand(2, 2, dtype=torch.complex64).conj(),
    torch.arange(12).view(3, 4).t(),
    torch.tensor([True, False]),
    torch.tensor([1.5, -2.0]).to(torch.bfloat16),
    torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
    np.arange(6, dtype=np.int16).reshape(2, 3).T,
    np.array(2.5, np.float32),
    np.float64(2.5),
    np.array(["a", "bcd"]),
    np.datetime64("2020-01-02"),
    np.zeros((0, 2), ">i4"),
    TensorDict({"a": torch.rand(2), "n": {"x": torch.ones(2, 3)}, "s": "text"}, [2]),
    TensorDict({}, [3], device="cpu"),
    TensorDict({"s": NonTensorStack("x", "y")}, [2], names=["time"]),
    lazy_stack([TensorDict(a=torch.zeros(2), s="p"), TensorDict(a=torch.zeros(3), s="q")]),
    Step(obs=torch.arange(2), text="q", batch_size=[2]),
]


def test_values_come_back_as_they_were_from_two_files(tmp_path: Path) -> None:
    values = VALUES * 2
    write_values(tmp_path, "x", values, allow_pickle=False, what="value")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.data", "x.jsonl"]
    for value, found in zip(values, read_values(tmp_path, "x", allow_pickle=False), strict=True):
        assert alike(found, value), value
    forms = [line for line in (tmp_path / "x.jsonl").read_text().splitlines() if "form" in line]
    assert len(forms) == len(set(forms))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda jsonl, data: (b"", data), "StopIteration"),
        (lambda jsonl, data: (b'{"format": 2}\n', data), "the supported format version"),
        (lambda jsonl, data: (jsonl[:-9], data), "JSONDecodeError|Expecting"),
        (
            lambda jsonl, data: (jsonl, data[:-8]),
            r"expected 8 more bytes|bytes",
        ),
        (lambda jsonl, data: (jsonl.replace(b"[0, [", b"[9, ["), data), "cannot be read"),
        (lambda jsonl, data: (jsonl.replace(b", [24]", b", [-24]"), data), "-24 bytes"),
        (lambda jsonl, data: (jsonl.replace(b", [24]", b", [99999999999]"), data), "99999999999"),
    ],
)
def test_damage_is_named(damage: Any, message: str, tmp_path: Path) -> None:
    write_values(tmp_path, "x", [torch.arange(3), "s"], allow_pickle=False, what="value")
    files = [tmp_path / "x.jsonl", tmp_path / "x.data"]
    for file, content in zip(files, damage(*[f.read_bytes() for f in files]), strict=True):
        file.write_bytes(content)
    with pytest.raises(CorruptBufferError, match=message):
        list(read_values(tmp_path, "x", allow_pickle=False))


@pytest.mark.parametrize(
    "form", [["what"], [], "tensor", ["tensor", "float32"], ["array", "|O", [1]], {"a": 1}, None]
)
def test_a_value_of_an_unknown_form_is_refused(form: Any, tmp_path: Path) -> None:
    write_values(tmp_path, "x", [torch.arange(3)], allow_pickle=False, what="value")
    lines = (tmp_path / "x.jsonl").read_text().splitlines()
    value, crc = [0, [], [24]], 0
    for part in (json.dumps(form), torch.arange(3).numpy(), json.dumps(value)):
        crc = _core.crc32c(part.encode() if isinstance(part, str) else part, crc)
    lines[1:] = json.dumps({"form": form}), json.dumps([*value, crc])
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    with pytest.raises(FormatError, match=r"x\.jsonl: .* not supported by this version"):
        list(read_values(tmp_path, "x", allow_pickle=False))


def test_pickle_is_neither_written_nor_read_unless_it_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"value 1 contains <.*Thing.* of type Thing"):
        write_values(tmp_path, "x", [1, {"a": Thing(2)}], allow_pickle=False, what="value")
    write_values(tmp_path, "y", [Trap(tmp_path / "trapped")], allow_pickle=True, what="value")
    with pytest.raises(ValueRefusedError, match="loading them runs code from the file"):
        list(read_values(tmp_path, "y", allow_pickle=False))
    assert not (tmp_path / "trapped").exists()
    write_values(tmp_path, "z", [Thing(1), {Thing: {1, 2}}], allow_pickle=True, what="value")
    assert list(read_values(tmp_path, "z", allow_pickle=True)) == [Thing(1), {Thing: {1, 2}}]


def test_an_array_with_a_mask_is_not_saved_without_its_mask(tmp_path: Path) -> None:
    masked = np.ma.masked_array([1, 2], [True, False])
    with pytest.raises(
        TypeError, match=r"value 0 contains masked_array(?s:.*) of type MaskedArray"
    ):
        write_values(tmp_path, "x", [masked], allow_pickle=False, what="value")
    write_values(tmp_path, "y", [masked], allow_pickle=True, what="value")
    (found,) = read_values(tmp_path, "y", allow_pickle=True)
    assert found.tolist() == [None, 2]
    rb = ReplayBuffer(storage=ListStorage(4), batch_size=2)
    rb.extend([1, 2])
    with pytest.raises(TypeError, match=r"extra\['a'\] is masked_array(?s:.*) of type MaskedArray"):
        rb.dumps(tmp_path / "save", extra={"a": masked})
    assert not (tmp_path / "save").exists()


# -- storages --------------------------------------------------------------------------------------


def test_objects_in_a_list_are_pickled_only_where_that_is_allowed(tmp_path: Path) -> None:
    def buffer(**options: Any) -> ReplayBuffer:
        return ReplayBuffer(storage=ListStorage(6), **options)

    rb = buffer()
    rb.extend([torch.ones(2), Thing(7)])
    remedy = r"storage.checkpointer = ListStorageCheckpointer\(allow_pickle=True\), which runs code"
    with pytest.raises(TypeError, match=rf"item 1 contains .*Thing.*{remedy}"):
        rb.dumps(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    allowed = {"checkpointer": ListStorageCheckpointer(allow_pickle=True)}
    rb.storage.checkpointer = allowed["checkpointer"]
    rb.dumps(tmp_path / "run")
    other = buffer()
    other.extend(["x"])
    with pytest.raises(ValueError, match="allow_pickle=True"):
        other.loads(tmp_path / "run")
    assert other.storage.get(slice(None)) == ["x"]
    other = buffer(**allowed)
    other.loads(tmp_path / "run")
    assert other.storage.get(1) == Thing(7)


def test_compressed_items_are_saved_compressed(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=CompressedListStorage(6, compression_level=19), batch_size=2)
    rb.extend(
        [
            TensorDict({"image": torch.zeros(100, 100, dtype=torch.uint8), "n": {"x": "text"}}, []),
            {"k": np.ones((50, 50)), "v": [torch.arange(1000)]},
        ]
    )
    rb.dumps(tmp_path)
    assert (tmp_path / "storage" / PRIVATE / "items.data").stat().st_size < 3000
    other = ReplayBuffer(storage=CompressedListStorage(6), batch_size=2)
    other.loads(tmp_path)
    assert other.storage.bytes() == rb.storage.bytes()
    assert other.storage.get(0)["image"].shape == torch.Size([100, 100])
    assert other.storage.get(0)["n", "x"] == "text"
    assert alike(other.storage.get(1), {"k": np.ones((50, 50)), "v": [torch.arange(1000)]})


def test_items_of_a_custom_codec_come_back(tmp_path: Path) -> None:
    def compress(tensor: torch.Tensor) -> torch.Tensor:
        return torch.frombuffer(
            bytearray(zlib.compress(tensor.numpy().tobytes())), dtype=torch.uint8
        )

    def decompress(chunk: torch.Tensor, metadata: dict[str, Any]) -> torch.Tensor:
        content = bytearray(zlib.decompress(chunk.numpy().tobytes()))
        return torch.frombuffer(content, dtype=metadata["dtype"]).reshape(metadata["shape"])

    codec: dict[str, Any] = {"compression_fn": compress, "decompression_fn": decompress}
    storage = CompressedListStorage(4, **codec)
    storage.set(range(2), [torch.arange(100), torch.ones(3, 4)])
    storage.dumps(tmp_path)
    other = CompressedListStorage(4, **codec)
    other.loads(tmp_path)
    assert torch.equal(other.get(0), torch.arange(100))
    assert torch.equal(other.get(1), torch.ones(3, 4))


def test_a_list_whose_files_do_not_fit_together_is_refused(tmp_path: Path) -> None:
    storage = ListStorage(4)
    storage.set(range(3), list("abc"))
    storage.dumps(tmp_path)
    file = tmp_path / PRIVATE / "items.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(CorruptBufferError, match="must have 3 items, got 2"):
        ListStorage(4).loads(tmp_path)


@pytest.mark.parametrize("alone", [True, False], ids=["a storage", "a buffer"])
def test_leftovers_of_an_earlier_save_are_no_items_of_a_newer_one(
    alone: bool, tmp_path: Path
) -> None:
    codec = {"dictionary_bytes": 1000, "shared_init": True, "max_bytes": 2**18}
    compressed = CompressedListStorage(500, **codec)
    texts = [{"text": f"item {at} " * 9, "n": torch.arange(at % 7 + 60)} for at in range(400)]
    plain = LazyStackStorage(4, shared_init=True, max_bytes=2**14)
    for storage, items in (
        (compressed, texts),
        (plain, [TensorDict(a=torch.arange(3))]),
        (ListStorage(4), ["x", "y"]),
        (LazyStackStorage(4, shared_init=True, max_bytes=2**14), [TensorDict(a=torch.arange(3))]),
    ):
        half = len(items) // 2  # a dictionary is trained on items after the first write
        storage.append(items[:half])
        storage.append(items[half:])
        other = ListStorage(500)
        for one, call in ((storage, "dumps"), (other, "loads")):
            getattr(one if alone else ReplayBuffer(storage=one), call)(tmp_path)
        assert alike(other.get(slice(None)), items)
        names = set(os.listdir((tmp_path if alone else tmp_path / "storage") / PRIVATE))
        of_a_list = type(storage) is ListStorage
        assert ("items.jsonl" in names, "records" in names) == (of_a_list, not of_a_list)
        assert ("dictionary" in names) == (storage is compressed)


# -- ensembles -------------------------------------------------------------------------------------


class Scale(torch.nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(factor))

    def forward(self, data: Any) -> Any:
        return data * self.factor


def test_an_ensemble_is_saved_member_by_member(tmp_path: Path) -> None:
    def buffers() -> list[Any]:
        return [
            TensorDictReplayBuffer(
                storage=LazyTensorStorage(5),
                sampler=PrioritizedSampler(5, 1.0, 1.0),
                batch_size=2,
            ),
            TensorDictReplayBuffer(storage=LazyMemmapStorage(4), batch_size=2),
            TensorDictReplayBuffer(storage=LazyTensorStorage(3), batch_size=2),
        ]

    parts = buffers()
    rb = ReplayBufferEnsemble(*parts, batch_size=4, p=[0.5, 0.25, 0.25])
    parts[0].extend(TensorDict({"a": torch.arange(7)}, [7]))
    parts[0].update_priority(torch.tensor([3]), torch.tensor([9.0]))
    parts[1].extend(TensorDict({"b": torch.arange(3.0)}, [3]))
    rb.dumps(tmp_path)
    assert json.loads((tmp_path / "storage" / "metadata.json").read_text()) == {
        "empty_members": [2]
    }
    others = buffers()
    others[2].extend(TensorDict({"c": torch.arange(3.0)}, [3]))
    other = ReplayBufferEnsemble(*others, batch_size=4)
    other.loads(tmp_path)
    assert others[0][:]["a"].tolist() == [5, 6, 2, 3, 4]
    assert others[0].write_count == 7
    assert ring_of(others[0]).tree.priorities()[3] == 9.0
    assert others[1][:]["b"].tolist() == [0.0, 1.0, 2.0]
    assert len(others[2]) == 0
    assert other.sampler.p.tolist() == rb.sampler.p.tolist()
    two = ReplayBufferEnsemble(*buffers()[:2], batch_size=4)
    with pytest.raises(
        ValueError, match=r"contains the storages \[0, 1, 2\] of an ensemble.* has 2"
    ):
        two.storage.loads(tmp_path / "storage")


def test_every_generator_of_an_ensemble_comes_back(tmp_path: Path) -> None:
    def ensemble(*seeds: int) -> Any:
        parts = [TensorDictReplayBuffer(storage=LazyTensorStorage(5)) for _ in range(2)]
        for part in parts:
            part.extend(TensorDict({"a": torch.arange(5)}, [5]))
        rb = ReplayBufferEnsemble(*parts, batch_size=4, generator=torch.Generator())
        rb.generator.manual_seed(seeds[0])
        parts[1].generator = torch.Generator().manual_seed(seeds[1])
        return rb

    rb, other = ensemble(1, 2), ensemble(7, 8)
    rb.sample()
    saved = rb[1].generator.get_state()
    rb.dumps(tmp_path)
    other.loads(tmp_path)
    for _ in range(3):
        assert torch.equal(rb.sample()["a"], other.sample()["a"])
    plain = [TensorDictReplayBuffer(storage=LazyTensorStorage(5)) for _ in range(2)]
    third = ReplayBufferEnsemble(*plain, batch_size=4)
    third.loads(tmp_path)
    assert plain[0].generator is third.generator is not plain[1].generator is not None
    assert torch.equal(plain[1].generator.get_state(), saved)


def test_transforms_of_an_ensembles_storages_come_back(tmp_path: Path) -> None:
    def ensemble(*factors: float) -> Any:
        storages = [LazyTensorStorage(4) for _ in factors]
        for storage in storages:
            storage.set(range(2), torch.ones(2))
        transforms = [Scale(factors[0]), None]
        return StorageEnsemble(*storages, transforms=transforms)

    saved, other = ensemble(3.0, 1.0), ensemble(5.0, 1.0)
    saved.dumps(tmp_path)
    other.loads(tmp_path)
    assert other._transforms[0].factor == 3.0


def test_states_of_ensembles_go_through_a_dict(tmp_path: Path) -> None:
    def ensemble() -> tuple[Any, list[Any]]:
        parts = [TensorDictReplayBuffer(storage=LazyTensorStorage(5)) for _ in range(2)]
        return ReplayBufferEnsemble(*parts, batch_size=4), parts

    rb, parts = ensemble()
    for n, part in enumerate(parts):
        part.extend(TensorDict({"a": torch.arange(n, n + 3)}, [3]))
    state = pickle.loads(pickle.dumps(rb.state_dict()))
    assert set(state) >= {"_storage", "_sampler", "_writer", "_transforms", "_batch_size", "_rng"}
    other, others = ensemble()
    other.load_state_dict(state)
    assert [part[:]["a"].tolist() for part in others] == [[0, 1, 2], [1, 2, 3]]
    assert isinstance(other.writer, WriterEnsemble)
    assert isinstance(other.sampler, SamplerEnsemble)
