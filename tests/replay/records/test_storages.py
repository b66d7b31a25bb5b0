"""Lists of records return the items that were written, until the ring overwrites them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    PrioritizedSampler,
    RecordTooLargeError,
    ReplayBuffer,
    SchemaMismatchError,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    attach,
)
from shmbuffer.items.records.compression import Zstd
from shmbuffer.storages.movers.record_store import RecordStore
from tests.replay.records.items import KINDS, is_item, item, items, shared

pytestmark = pytest.mark.product(few=4)

Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes storages of records in the test's folder; ``name`` is the name of the directory."""
    made: list[Any] = []

    def storage(kind: type[Any] = LazyStackStorage, *, name: str = "buffer", **options: Any) -> Any:
        made.append(shared(kind, tmp_path / name, **options))
        return made[-1]

    yield storage
    for one in made:
        one.close()


every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


# -- what is written is read -----------------------------------------------------------------------


# -- two capacities --------------------------------------------------------------------------------


def test_the_oldest_go_when_there_are_as_many_bytes_as_may_be(make: Make) -> None:
    rb = ReplayBuffer(storage=make(max_size=100, max_bytes=2**16), batch_size=64)
    large = 2000  # 22 KB, so that two of them fit
    for number in range(6):
        rb.add(item(number, large))
    held = [at for at in range(100) if at in rb.storage]
    assert held == [4, 5]
    assert (len(rb), rb.write_count) == (2, 6)
    assert [is_item(one, at, large) for one, at in zip(rb[:].unbind(0), held, strict=True)]
    assert {int(one["id"]) for one in rb.sample().unbind(0)} == {4, 5}
    assert rb.stats()["evicted"] == 4
    with pytest.raises(IndexError, match="there is no item at 0"):
        rb[0]
    with pytest.raises(IndexError, match="there is no item at 3"):
        rb[[4, 3]]
    assert is_item(rb[-1], 5, large)
    assert [len(chunk) for chunk in rb.iter_in_order(2)] == [2]


def test_a_lap_of_large_items_leaves_places_without_an_item(make: Make) -> None:
    rb = ReplayBuffer(storage=make(max_size=6, max_bytes=2**16))
    rb.extend([item(number, 40) for number in range(6)])
    rb.add(item(6, 5700))  # 62 KB, nearly the whole ring
    held = [at for at in range(6) if at in rb.storage]
    assert held[0] == 0
    assert held[1:] == list(range(6 - len(held) + 1, 6))  # the newest of the others
    assert 1 < len(held) < 6
    rb.extend([item(number, 5) for number in range(7, 9)])
    found = [int(one["id"]) for one in rb[:].unbind(0)]
    assert found[:3] == [6, 7, 8]
    assert len(rb) == len(found)


@every_kind
def test_a_record_that_is_larger_than_the_ring_changes_nothing(kind: type[Any], make: Make) -> None:
    rb = ReplayBuffer(storage=make(kind, max_bytes=2**16), batch_size=4)
    rb.extend(items(0, 5))
    noise = TensorDict(a=torch.randint(0, 256, (2**17,), dtype=torch.uint8))
    for write in (
        lambda: rb.add(noise),
        lambda: rb.extend([noise]),
        lambda: rb.__setitem__(2, noise),
    ):
        with pytest.raises(RecordTooLargeError, match=r"bytes.*max_bytes|bytes"):
            write()
    assert [is_item(one, at) for at, one in enumerate(rb[:].unbind(0))] == [True] * 5
    assert rb.write_count == 5


# -- changed where they are ------------------------------------------------------------------------


@every_kind
def test_an_item_is_replaced_by_one_of_another_size_and_keeps_its_priority(
    kind: type[Any], make: Make
) -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=make(kind), batch_size=4
    )
    rb.extend(items(0, 4))
    rb.update_priority(torch.arange(4), torch.tensor([1.0, 5.0, 0.0, 2.0]))
    rb[1] = item(40, 300)
    rb[2:4] = [item(41), item(42)]
    assert rb.sampler.ring().tree.priorities()[:4].tolist() == [1.0, 5.0, 0.0, 2.0]
    assert rb.write_count == 4
    assert [int(one["id"]) for one in rb[:].unbind(0)] == [0, 40, 41, 42]
    assert is_item(rb[1], 40, 300)
    rb[[0, 0]] = [item(50), item(51)]
    assert is_item(rb[0], 51)  # the last value wins
    rb.storage.set(5, item(60))  # a slot without an item, at the end of the list
    assert len(rb) == rb.write_count == 5
    assert is_item(rb[5], 60)


@every_kind
def test_entries_of_items_are_changed_and_the_rest_of_them_stays(
    kind: type[Any], make: Make
) -> None:
    rb = ReplayBuffer(storage=make(kind), batch_size=4)
    rb.extend([item(number, 3) for number in range(4)])
    rb.set_at_("id", torch.tensor(70), 1)
    rb.set_at_("tokens", torch.arange(6).reshape(2, 3), [2, 3])
    rb.set_at_(("deep", "image"), 9, slice(0, 2))
    rb.set_at_("text", "same", slice(2, None))
    rb.update_({"id": torch.tensor([10, 11, 12, 13])})
    assert [int(one["id"]) for one in rb[:].unbind(0)] == [10, 11, 12, 13]
    assert rb[3]["tokens"].tolist() == [3, 4, 5]
    assert rb[0]["deep", "image"].unique().tolist() == [9]
    assert rb[2]["deep", "image"].unique().tolist() == [2]
    assert [one["text"] for one in rb[:].unbind(0)] == ["number 0", "number 1", "same", "same"]
    with pytest.raises(KeyError):
        rb.set_at_("none", 1, 0)
    with pytest.raises(IndexError, match="there is no item at 7"):
        rb.set_at_("id", 1, [0, 7])
    assert rb[0]["id"] == 10


@every_kind
def test_only_items_that_are_still_there_are_changed_by_a_sample(
    kind: type[Any], make: Make
) -> None:
    rb = TensorDictReplayBuffer(storage=make(kind, max_size=6), batch_size=20)
    rb.extend([item(number, 2) for number in range(6)])
    sample = rb.sample()
    rb.extend([item(number, 2) for number in range(6, 9)])  # the first three are evicted
    index = sample["index"]
    result = rb.update_if_present(
        index=index,
        generation=sample["index_generation"],
        patch={
            "tokens": torch.full((20, 2), -1),
            "deep": {"image": torch.zeros(20, 2, 3, dtype=torch.uint8)},
        },
    )
    assert torch.equal(result.updated, index >= 3)
    changed = set(index[index >= 3].tolist())
    for at in range(6):
        assert (rb[at]["tokens"].tolist() == [-1, -1]) is (at in changed)
    again = rb.update_if_present(
        index=index,
        generation=sample["index_generation"],
        patch=TensorDict(tokens=torch.zeros(20, 2, dtype=torch.int64)),
    )
    assert again.updated_count == 0  # each item has another generation by now


def test_an_error_for_items_without_entries_says_what_to_do(make: Make) -> None:
    rb = ReplayBuffer(storage=make(CompressedListStorage), batch_size=2)
    rb.extend([{"a": 1}])
    with pytest.raises(TypeError, match=r"a dict has no entries.*rb\[index\] = item"):
        rb.set_at_("a", 2, 0)
    with pytest.raises(TypeError, match="a patch must be a TensorDict or a dict"):
        rb.update_if_present(index=[0], generation=[0], patch=[1])


# -- samplers --------------------------------------------------------------------------------------


@every_kind
def test_priorities_go_with_the_write_also_with_the_first(kind: type[Any], tmp_path: Path) -> None:
    storage = kind(20, scratch_dir=tmp_path / "lazy", max_bytes=2**20)
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=storage, batch_size=30, priority_key="p"
    )
    rb.extend([item(n).set("p", torch.tensor(float(n == 2))) for n in range(4)])
    assert rb.sampler.ring().tree.priorities()[:4].tolist() == [0.0, 0.0, 1.0, 0.0]
    assert rb.stats()["updates_applied"] == 0  # the priorities were part of the write
    sample = rb.sample()
    assert {int(one["id"]) for one in sample.unbind(0)} == {2}
    assert sample["_weight"].tolist() == [1.0] * 30
    rb.close()


def test_slices_see_what_was_changed_where_it_is(make: Make) -> None:
    rb = TensorDictReplayBuffer(
        storage=make(max_size=30), sampler=SliceSampler(slice_len=2, end_key="done"), batch_size=20
    )
    done = torch.tensor([False, False, True] * 4)
    rb.extend(TensorDict({"n": torch.arange(12), "done": done}, [12]))
    assert set((rb.sample()["n"].reshape(-1, 2)[:, 0] % 3).tolist()) == {0, 1}
    rb.set_("done", torch.tensor([False, True] * 6))
    assert set((rb.sample()["n"].reshape(-1, 2)[:, 0] % 2).tolist()) == {0}


def test_slices_read_the_ends_of_trajectories_once_and_nothing_else_of_the_items(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    entries = RecordStore.entries

    def counted(store: Any, slots: Any, paths: Any) -> Any:
        asked.extend(slots.tolist())
        return entries(store, slots, paths)

    monkeypatch.setattr(RecordStore, "entries", counted)
    rb = TensorDictReplayBuffer(
        storage=make(CompressedListStorage, max_size=30),
        sampler=SliceSampler(slice_len=2, end_key=("next", "done")),
        batch_size=10,
    )
    done = torch.tensor([False, False, True] * 4)
    rb.extend(TensorDict({"n": torch.arange(12), "next": {"done": done}}, [12]))
    for _ in range(3):
        rb.sample()
    assert asked == list(range(12))
    rb.extend(TensorDict({"n": torch.arange(12, 15), "next": {"done": done[:3]}}, [3]))
    rb[4] = rb[3]
    for _ in range(3):
        rb.sample()
    assert sorted(asked[12:]) == [4, 12, 13, 14]


def test_flags_of_different_shapes_are_refused_by_slices(make: Make) -> None:
    rb = TensorDictReplayBuffer(
        storage=make(), sampler=SliceSampler(slice_len=1, end_key="done"), batch_size=2
    )
    rb.extend([TensorDict(done=torch.zeros(n, dtype=torch.bool)) for n in (1, 2)])
    with pytest.raises(RuntimeError, match=r".*'done', which ends.*\[2\] in one item and \[1\]"):
        rb.sample()
    plain = TensorDictReplayBuffer(
        storage=make(name="plain"), sampler=SliceSampler(slice_len=1, end_key="done"), batch_size=2
    )
    plain.extend([TensorDict(a=torch.zeros(1))])
    with pytest.raises(RuntimeError, match="the sampler cannot find the ends of trajectories"):
        plain.sample()


# -- what it is told -------------------------------------------------------------------------------


def test_only_named_entries_are_compressed(make: Make) -> None:
    zeros = TensorDict({"a": torch.zeros(1000), "b": {"c": torch.zeros(1000)}})
    both, one, nested = (
        make(CompressedListStorage, name=str(at), compress=keys)
        for at, keys in enumerate((None, ["a"], [("b", "c")]))
    )
    for storage in (both, one, nested):
        storage.set(0, zeros)
        assert (storage.get(0) == zeros).all()
    assert both.bytes() < 400
    assert 4000 < one.bytes() < 4400
    assert one.bytes() == nested.bytes()


def small(number: int) -> dict[str, Any]:
    """Makes an item that is too small to compress alone and very similar to all others."""
    text = f"observation of the environment number {number}, which goes on as all of them do. " * 2
    return {"text": text.encode(), "n": number}


def test_a_dictionary_is_learned_from_the_first_items_and_everybody_uses_it(make: Make) -> None:
    storage = make(CompressedListStorage, max_size=4000, dictionary_bytes=512)
    early = ReplayBuffer(storage=make(CompressedListStorage, max_size=4000), batch_size=4)
    rb = ReplayBuffer(storage=storage, batch_size=4)
    rb.extend([small(number) for number in range(10)])
    before = storage.bytes() / 10
    assert storage.open_engine.seat.dictionary() is None
    for start in range(10, 510, 100):
        rb.extend([small(number) for number in range(start, start + 100)])
    dictionary = storage.open_engine.seat.dictionary()
    assert dictionary is not None
    assert len(dictionary) <= 512
    held = storage.bytes()
    rb.extend([small(number) for number in range(510, 610)])
    assert (storage.bytes() - held) / 100 < before - 30
    late = ReplayBuffer(storage=make(CompressedListStorage, max_size=4000), batch_size=4)
    # including handles that were opened before the dictionary was trained
    for buffer in (rb, early, late):
        assert [buffer[at] for at in (0, 300, 609)] == [small(at) for at in (0, 300, 609)]
    late.extend([small(700)])
    assert early[610] == small(700)


def test_samples_too_few_to_learn_from_are_compressed_without_a_dictionary(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(samples: list[bytes], *_: int) -> bytes:
        raise ValueError(f"nothing in {len(samples)} samples")

    monkeypatch.setattr(Zstd, "train", staticmethod(train))
    rb = ReplayBuffer(storage=make(CompressedListStorage, dictionary_bytes=256))
    for _ in range(4):
        rb.extend(torch.zeros(25, 4000, dtype=torch.uint8))
    assert rb.storage.open_engine.seat.dictionary() is None
    (message,) = caplog.messages  # logged once
    assert message.endswith("buffer: continuing without a dictionary: nothing in 75 samples")
    assert rb[50].sum() == 0


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) ^ 255


def back(chunk: torch.Tensor, metadata: dict[str, Any]) -> torch.Tensor:
    return (chunk ^ 255).view(metadata["dtype"]).reshape(metadata["shape"])


def test_custom_functions_compress_and_are_passed_to_attach(make: Make, tmp_path: Path) -> None:
    functions = {"compression_fn": as_bytes, "decompression_fn": back}
    rb = ReplayBuffer(storage=make(CompressedListStorage, **functions), batch_size=4)
    data = TensorDict({"a": torch.arange(12.0).reshape(4, 3), "b": torch.arange(4)}, [4])
    rb.extend(data)
    rb.add(TensorDict(a=torch.zeros(3), b=torch.tensor(9), t="text"))
    assert (rb[:4] == data).all()
    other = attach(tmp_path / "buffer", **functions)
    assert (other[:4] == data).all()
    assert other[4]["t"] == "text"
    other.close()
    without = attach(tmp_path / "buffer")
    with pytest.raises(RuntimeError, match="with the matching decompression_fn"):
        without[0]
    without.close()


def test_ragged_batches_are_padded_or_nested_as_the_storage_was_told(make: Make) -> None:
    told: list[tuple[Any, Any]] = [
        (-1, lambda batch: (batch["tokens"], batch["mask"])),
        ({"value": {"tokens": -1}, "mask_key": "m"}, lambda batch: (batch["tokens"], batch["m"])),
    ]
    for at, (asked, look) in enumerate(told):
        for storage in (
            make(name=f"stack{at}", pad_output=asked),
            make(CompressedListStorage, name=f"compressed{at}", pad_output=asked),
            LazyStackStorage(10, pad_output=asked),
            CompressedListStorage(10, pad_output=asked),
        ):
            rb = ReplayBuffer(storage=storage, batch_size=3)
            rb.extend([TensorDict(tokens=torch.arange(n), text=str(n)) for n in (2, 4)])
            batch = rb[:]
            assert type(batch) is TensorDict
            tokens, mask = look(batch)
            assert tokens.tolist() == [[0, 1, -1, -1], [0, 1, 2, 3]]
            assert mask.tolist() == [[True, True, False, False], [True] * 4]
            assert batch["text"] == ["2", "4"]
            # one item is returned without a batch dimension
            assert rb[1]["tokens"].tolist() == [0, 1, 2, 3]
    for storage in (
        make(name="nested", pad_output="nested"),
        LazyStackStorage(9, pad_output={"keys": ["tokens"]}),
    ):
        rb = ReplayBuffer(storage=storage)
        rb.extend([TensorDict(tokens=torch.arange(n)) for n in (2, 4)])
        found = rb[:]["tokens"]
        assert found.is_nested
        assert [row.tolist() for row in found.unbind()] == [[0, 1], [0, 1, 2, 3]]


def test_items_are_sent_to_the_device_of_the_storage_when_they_are_read(make: Make) -> None:
    for kind in KINDS:
        storage = make(kind, name=kind.__name__, device="meta")
        storage.set(range(2), [TensorDict(a=torch.zeros(2)), TensorDict(a=torch.ones(3))])
        assert storage.get(0)["a"].device.type == "meta"
        batch = ReplayBuffer(storage=storage)[:]
        assert [one["a"].device.type for one in batch.unbind(0)] == ["meta", "meta"]


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_it", "error", "words"),
    [
        (
            lambda: LazyStackStorage(9, scratch_dir="x"),
            ValueError,
            "got 9 and None; pass max_bytes",
        ),
        (
            lambda: LazyStackStorage(shared_init=True, max_bytes=9),
            ValueError,
            r"pass max_size \(items\)",
        ),
        (
            lambda: CompressedListStorage(None, shared_init=True),
            ValueError,
            r"pass max_size \(items\)",
        ),
        (
            lambda: LazyStackStorage(9, max_bytes=9),
            ValueError,
            "max_bytes=9.*scratch_dir or shared_init",
        ),
        (lambda: shared(max_bytes=0), ValueError, "an int of at least 1, got 0"),
        (lambda: shared(max_bytes=1e6), ValueError, "an int of at least 1, got 1000000.0"),
        (lambda: shared(max_bytes="1G"), ValueError, "an int of at least 1, got '1G'"),
        (
            lambda: LazyStackStorage(9, pad_output="dense"),
            TypeError,
            "pad_output must be a number.*'dense'",
        ),
        (lambda: LazyStackStorage(9, pad_output={"mask": 1}), TypeError, "got {'mask': 1}"),
        (
            lambda: CompressedListStorage(9, dictionary_bytes=9),
            ValueError,
            "dictionary_bytes=9.*scratch_dir",
        ),
        (
            lambda: CompressedListStorage(9, compress=["a"]),
            ValueError,
            r"compress=\['a'\].*is for records",
        ),
        (
            lambda: shared(CompressedListStorage, compress="obs"),
            TypeError,
            r"list of keys such as \['obs'\]",
        ),
        (
            lambda: shared(CompressedListStorage, dictionary_bytes=-1),
            ValueError,
            "dictionary_bytes must be at least 0, got -1",
        ),
        (lambda: shared(CompressedListStorage, compression_level=0), ValueError, "1 to 22, got 0"),
        (
            lambda: shared(CompressedListStorage, compression_fn=as_bytes, dictionary_bytes=9),
            ValueError,
            "dictionary_bytes=9.*replaced by compression_fn",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_senseless_argument_is_refused_by_its_value(
    make_it: Callable[[], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make_it()


@every_kind
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (TensorDict(a=torch.zeros(2), b={1, 2}), r"'b'.*set.*a record can contain tensors"),
        ({"a": [1, object()]}, r"'a' -> 1.*object.*a record can contain tensors"),
        (1j, "complex"),
    ],
    ids=["set", "object", "complex"],
)
def test_an_item_that_needs_pickle_is_refused_and_makes_no_directory(
    kind: type[Any], wrong: Any, words: str, tmp_path: Path
) -> None:
    storage = kind(9, scratch_dir=tmp_path / "none", max_bytes=2**16)
    rb = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=storage)
    for write in (lambda: rb.add(wrong), lambda: rb.extend([wrong]), lambda: storage.set(0, wrong)):
        with pytest.raises(TypeError, match=words):
            write()
    assert not (tmp_path / "none").exists()


def test_a_directory_says_what_it_is_made_of(make: Make, tmp_path: Path) -> None:
    make(max_size=9, max_bytes=2**16)
    where = {"scratch_dir": tmp_path / "buffer", "shared_init": True}
    for made, words in (
        (
            lambda: shared(path=tmp_path / "buffer", max_size=8),
            "max_size 9, ndim 1 and max_bytes 65536, but this storage was created with max_size 8",
        ),
        (
            lambda: shared(path=tmp_path / "buffer", max_size=9, max_bytes=2**17),
            "max_bytes 65536, but this storage was created with.*131072",
        ),
        (
            lambda: shared(CompressedListStorage, tmp_path / "buffer", 9, 2**16),
            "contains records, as in a LazyStackStorage, not records, as in a Compressed",
        ),
        (
            lambda: LazyMemmapStorage(9, **where),
            "contains records.*not rows, as in a LazyMemmapStorage",
        ),
    ):
        with pytest.raises(SchemaMismatchError, match=words):
            made()
    rows = LazyMemmapStorage(9, scratch_dir=tmp_path / "rows", shared_init=True)
    with pytest.raises(
        SchemaMismatchError, match=r"contains rows.*attach\(\), which chooses the right storage"
    ):
        shared(path=tmp_path / "rows", max_size=9)
    rows.close()


def test_a_prioritized_sampler_with_another_alpha_is_refused_as_for_rows(make: Make) -> None:
    ReplayBuffer(storage=make(), sampler=PrioritizedSampler(100, 0.5, 1.0)).extend(items(0, 2))
    with pytest.raises(ValueError, match="alpha"):
        ReplayBuffer(storage=make(), sampler=PrioritizedSampler(100, 0.9, 1.0))


@every_kind
def test_nested_samples_of_items_with_a_batch_size_say_their_index(
    kind: type[Any], make: Make
) -> None:
    storage = make(kind, pad_output="nested")
    rb = TensorDictReplayBuffer(storage=storage, batch_size=6)
    lengths = (2, 3, 4)
    rb.extend([TensorDict(obs=torch.arange(n), batch_size=[n]) for n in lengths])
    for _ in range(5):
        batch = rb.sample()
        assert batch.batch_size == torch.Size([6])
        found = [len(one) for one in batch["obs"].unbind()]
        assert found == [lengths[at] for at in batch["index"].tolist()]


def test_custom_functions_are_refused_where_others_use_zstd(tmp_path: Path, make: Make) -> None:
    rb = ReplayBuffer(storage=make(CompressedListStorage))
    rb.extend(items(0, 3))
    with pytest.raises(ValueError, match="compressed with zstd, so other clients could not read"):
        attach(tmp_path / "buffer", compression_fn=as_bytes, decompression_fn=as_bytes)
