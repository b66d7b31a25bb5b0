"""Our compact episode data equal TorchRL's byte for byte, and files load in both directions."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.compat.family import ours, theirs
from tests.replay.episodes import ring, same, stream

FORMS = [("TED2Flat", "Flat2TED"), ("TED2Nested", "Nested2TED")]
CHECKPOINTERS = ["FlatStorageCheckpointer", "NestedStorageCheckpointer", "H5StorageCheckpointer"]

pytestmark = pytest.mark.filterwarnings("default")  # warnings of TorchRL and of nested tensors


def values(tensor: torch.Tensor) -> Any:
    return [part.tolist() for part in tensor.unbind(0)] if tensor.is_nested else tensor.tolist()


def content(data: TensorDict) -> dict[str, Any]:
    return {str(key): values(data[key]) for key in data.keys(True, True)}


def save(hook: Any, data: TensorDict, shift: int, is_full: bool) -> TensorDict:
    hook.shift, hook.is_full = shift, is_full
    return hook(data)


def cases(lanes: Iterable[tuple[int, ...]]) -> list[tuple[tuple[int, ...], int, int, float]]:
    """Yields lanes, slots, steps written, and the share of steps that end an episode."""
    random = torch.Generator().manual_seed(0)

    def one(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=random))

    return [(lane, one(1, 12), one(1, 30), (0.0, 0.3, 0.9)[one(0, 3)]) for lane in lanes]


LANES = [(), (1,), (3,), (2, 2)]


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize(("saving", "loading"), FORMS)
def test_saved_values_are_torchrls(saving: str, loading: str, number: int) -> None:
    for seed, (lanes, slots, steps, ends) in enumerate(cases(LANES * 10)[number::5]):
        data, shift, is_full = ring(stream(steps, lanes, seed=seed, ends=ends), slots)
        mine, other = (
            save(getattr(library, saving)(), data, shift, is_full) for library in (ours, theirs)
        )
        assert content(mine) == content(other)
        assert mine.batch_size == other.batch_size
        for name in ("shift", "is_full"):
            assert mine[name] == other[name]
        assert mine["_storage_shape"] == list(other["_storage_shape"])
        for saved in (mine, other):  # we read both files
            back = getattr(ours, loading)()(saved)
            same(back if is_full else back[:shift], data if is_full else data[:shift])


@pytest.mark.parametrize(("saving", "loading"), FORMS)
def test_torchrl_reads_what_our_hooks_give(saving: str, loading: str) -> None:
    # TorchRL fails if a ring with lanes or a destination was filled exactly to its end, and if
    # there is more than one lane dimension.
    for seed, (lanes, slots, steps, ends) in enumerate(cases(LANES[:3] * 10)):
        data, shift, is_full = ring(stream(steps, lanes, seed=seed, ends=ends), slots)
        if is_full and shift == slots and lanes:
            continue
        saved = save(getattr(ours, saving)(), data, shift, is_full)
        back = getattr(theirs, loading)()(saved)
        items = slice(None) if is_full else slice(shift)
        for key in data.keys(True, True):
            assert torch.equal(back[key][items], data[key][items]), key


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_torchrl_fails_loudly_on_items_that_do_not_continue_each_other(turn: int) -> None:
    # Two collectors take turns with this many steps each.
    parts = [stream(6, seed=seed, ends=0.0).split(turn) for seed in (1, 2)]
    data = torch.cat([part for pair in zip(*parts, strict=True) for part in pair])
    flat = save(ours.TED2Flat(), data, 12, True)
    same(ours.Flat2TED()(flat), data)
    with pytest.raises(TypeError, match="NoneType"):  # TorchRL's storage has no _storage_shape
        theirs.Flat2TED()(flat)
    nested = save(ours.TED2Nested(), data, 12, True)
    for saved in (nested, ours.H5Combine()(ours.H5Split()(nested))):
        same(ours.Nested2TED()(saved), data)
        with pytest.raises(TypeError, match="NoneType"):
            theirs.Nested2TED()(saved)


def test_a_split_is_torchrls() -> None:
    data, shift, is_full = ring(stream(40, seed=3, ends=0.6), 30)
    nested = save(ours.TED2Nested(), data, shift, is_full)
    mine, other = (library.H5Split()(nested) for library in (ours, theirs))
    assert content(mine) == content(other)
    assert len(mine.keys()) > 10
    assert content(ours.H5Combine()(other)) == content(theirs.H5Combine()(mine))


@pytest.mark.parametrize(("saving", "loading"), FORMS)
def test_torchrls_rows_for_empty_places_are_not_compared(saving: str, loading: str) -> None:
    random = torch.Generator().manual_seed(0)
    for seed in range(20):
        data, shift, is_full = ring(stream(5, (2,), seed=seed), 9)
        for key in ("done", ("next", "done")):  # uninitialized memory
            data[key][shift:] = torch.rand(4, 2, 1, generator=random) < 0.5
        saved = save(getattr(theirs, saving)(), data, shift, is_full)
        same(getattr(ours, loading)()(saved)[:shift], data[:shift])


def buffer(library: Any, checkpointer: str, slots: int, ndim: int) -> Any:
    rb = library.TensorDictReplayBuffer(
        storage=library.LazyTensorStorage(slots * (3 if ndim == 2 else 1), ndim=ndim), batch_size=4
    )
    rb.storage.checkpointer = getattr(library, checkpointer)()
    return rb


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("steps", [4, 12, 18])
@pytest.mark.parametrize("checkpointer", CHECKPOINTERS)
@pytest.mark.parametrize(("writes", "reads"), [("ours", "theirs"), ("theirs", "ours")])
def test_a_buffer_saved_in_one_library_is_loaded_in_the_other(
    writes: str, reads: str, checkpointer: str, steps: int, ndim: int, tmp_path: Path
) -> None:
    libraries = {"ours": ours, "theirs": theirs}
    written = stream(steps, (3,) if ndim == 2 else (), seed=steps)
    rb, other = (buffer(libraries[name], checkpointer, 10, ndim) for name in (writes, reads))
    for part in written.split(6):
        rb.extend(part.transpose(0, 1) if ndim == 2 else part)
    rb.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    here, there = (one[:].exclude("index") for one in (other, rb))
    same(here.contiguous(), there.contiguous())
    assert len(other) == len(rb) == min(steps, 10) * (3 if ndim == 2 else 1)
    # The next write goes to the same slot as in the saved buffer.
    more = stream(3, (3,) if ndim == 2 else (), seed=99)
    for one in (rb, other):
        one.extend(more.transpose(0, 1) if ndim == 2 else more)
    here, there = (one[:].exclude("index") for one in (other, rb))
    same(here.contiguous(), there.contiguous())


@pytest.mark.parametrize("checkpointer", CHECKPOINTERS)
def test_a_save_by_torchrl_over_one_of_ours_counts(checkpointer: str, tmp_path: Path) -> None:
    rb, other = (buffer(library, checkpointer, 10, 1) for library in (ours, theirs))
    rb.extend(stream(13, seed=1))
    rb.dumps(tmp_path / "saved")
    other.extend(stream(7, seed=2))
    other.extend(stream(8, seed=3))
    other.dumps(tmp_path / "saved")
    fresh = buffer(ours, checkpointer, 10, 1)
    fresh.loads(tmp_path / "saved")
    more = stream(2, seed=4)
    for one in (fresh, other):
        one.extend(more)
    same(fresh[:].exclude("index"), other[:].exclude("index"))
