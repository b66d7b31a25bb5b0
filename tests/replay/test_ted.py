"""Compact episode data: every observation is stored once, and every item is restored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, PersistentTensorDict, TensorDict

from shmbuffer import (
    BufferExistsError,
    Flat2TED,
    H5Combine,
    H5Split,
    Nested2TED,
    SchemaMismatchError,
    TED2Flat,
    TED2Nested,
)
from tests.replay.episodes import Step, ring, same, stream
from tests.selection import seeds

pytestmark = pytest.mark.product(few=4)

LANES = [(), (1,), (3,), (2, 2)]


def save(hook: TED2Flat, data: Any, shift: int, is_full: bool, path: Path | None = None) -> Any:
    hook.shift = shift
    hook.is_full = is_full
    return hook(data, path=path)


def through_hdf5(data: TensorDict, path: Path) -> TensorDict:
    file = PersistentTensorDict.from_dict(H5Split()(data), path)
    file.close()
    file = PersistentTensorDict.from_h5(path)
    try:
        return H5Combine()(file)
    finally:
        file.close()


def lists(tensor: torch.Tensor) -> list[Any]:
    return [part.tolist() for part in tensor.unbind(0)]


def steps(*rows: tuple[float, float, bool]) -> TensorDict:
    """Makes items from (observation, next observation, whether the episode is over)."""
    here, there, done = zip(*rows, strict=True)
    return TensorDict(
        {
            "observation": torch.tensor(here),
            "action": torch.arange(len(rows)) * 10,
            "done": torch.zeros(len(rows), 1, dtype=torch.bool),
            "next": {
                "observation": torch.tensor(there),
                "reward": torch.arange(len(rows), dtype=torch.float32)[:, None],
                "done": torch.tensor(done)[:, None],
            },
        },
        batch_size=[len(rows)],
    )


def two_episodes() -> TensorDict:
    return steps((0, 1, False), (1, 2, True), (10, 11, False), (11, 12, False), (12, 13, True))


# -- the flat form -----------------------------------------------------------------------------


def test_an_observation_that_is_also_the_next_one_of_another_item_is_kept_once() -> None:
    flat = TED2Flat()(two_episodes())
    assert flat["observation"].tolist() == [0, 1, 2, 10, 11, 12, 13]
    assert ("next", "observation") not in flat.keys(True)


def test_flags_and_rewards_come_from_under_next_and_the_rest_stays_as_it_is() -> None:
    flat = TED2Flat()(two_episodes())
    assert flat["done"].flatten().tolist() == [False, True, False, False, True]
    assert flat["reward"].flatten().tolist() == [0, 1, 2, 3, 4]
    assert flat["action"].tolist() == [0, 10, 20, 30, 40]
    assert flat.batch_size == ()


def test_an_open_trajectory_at_the_end_keeps_its_last_observation() -> None:
    data = steps((0, 1, False), (1, 2, True), (10, 11, False), (11, 12, False))
    assert TED2Flat()(data)["observation"].tolist() == [0, 1, 2, 10, 11, 12]
    same(Flat2TED()(TED2Flat()(data)), data)


def test_a_full_ring_is_put_in_the_order_of_time() -> None:
    # Slot 2 is the oldest; the episode in slots 3, 4, 0, 1 wraps around.
    data = steps((12, 13, False), (13, 14, False), (1, 2, True), (10, 11, False), (11, 12, False))
    flat = save(TED2Flat(), data, shift=2, is_full=True)
    assert flat["action"].tolist() == [20, 30, 40, 0, 10]
    assert flat["observation"].tolist() == [1, 2, 10, 11, 12, 13, 14]
    assert (flat["shift"], flat["is_full"], flat["_storage_shape"]) == (2, True, [5])
    same(Flat2TED()(flat), data)


def test_a_trajectory_ends_at_the_item_that_was_written_last() -> None:
    # Slot 1 is the newest and its episode continues; slot 2 is the oldest, of the same episode.
    data = steps((8, 9, False), (9, 10, False), (5, 6, False), (6, 7, False), (7, 8, False))
    flat = save(TED2Flat(), data, shift=2, is_full=True)
    assert flat["observation"].tolist() == [5, 6, 7, 8, 9, 10]
    same(Flat2TED()(flat), data)


def test_places_that_hold_no_item_are_rows_of_zeros() -> None:
    data = steps((0, 1, False), (1, 2, False), (7, 7, True), (8, 8, True))  # the last two are old
    flat = save(TED2Flat(), data, shift=2, is_full=False)
    assert flat["observation"].tolist() == [0, 1, 2, 0, 0]
    assert flat["action"].tolist() == [0, 10, 0, 0]
    assert flat["done"].flatten().tolist() == [False] * 4
    back = Flat2TED()(flat)
    same(back[:2], data[:2])
    assert back["next", "observation"].tolist() == [1, 2, 0, 0]


def test_the_shift_of_a_ring_that_was_written_to_its_end_is_its_size() -> None:
    assert save(TED2Flat(), two_episodes(), shift=5, is_full=True)["shift"] == 5
    assert save(TED2Flat(), two_episodes(), shift=0, is_full=True)["shift"] == 5


def test_shift_and_is_full_are_attributes_that_a_checkpointer_sets() -> None:
    for hook in (TED2Flat(), TED2Nested(), H5Split()):
        assert (hook.shift, hook.is_full) == (None, None)
        hook.shift, hook.is_full = 3, True
        assert (hook.shift, hook.is_full) == (3, True)
    assert not hasattr(Flat2TED(), "shift")


@pytest.mark.product("form lanes", few=6)
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("seed", seeds(3, 8))
@pytest.mark.parametrize("form", ["flat", "flat file", "nested", "nested file", "hdf5"])
def test_every_item_comes_back_as_it_was(
    form: str, seed: int, lanes: tuple[int, ...], tmp_path: Path
) -> None:
    random = torch.Generator().manual_seed(seed)
    slots, count = torch.randint(1, 14, (2,), generator=random).tolist()
    data, shift, is_full = ring(stream(count, lanes, seed=seed), slots)
    nested = not form.startswith("flat")
    saving, loading = (TED2Nested(), Nested2TED()) if nested else (TED2Flat(), Flat2TED())
    path = tmp_path / "form" if form.endswith("file") else None
    saved = save(saving, data, shift, is_full, path)
    if path is not None:
        saved = TensorDict.load_memmap(path)
    if form == "hdf5":
        saved = through_hdf5(saved, tmp_path / "form.h5")
    same(loading(saved), data)
    out = torch.zeros_like(data)
    assert loading(saved, out=out) is out
    same(out, data)


def test_the_observations_are_as_many_as_items_and_trajectories() -> None:
    data, shift, is_full = ring(stream(50, (2,), seed=3), 20)
    ends = save(TED2Nested(), data, shift, is_full).batch_size[0]
    flat = save(TED2Flat(), data, shift, is_full)
    assert len(flat["observation"]) == len(flat["camera", "pixels"]) == 40 + ends
    assert len(flat["action"]) == len(flat["reward"]) == len(flat["done"]) == 40


def test_the_rows_of_a_lane_follow_each_other() -> None:
    one, other = steps((0, 1, True), (5, 6, False)), steps((100, 101, False), (101, 102, False))
    flat = TED2Flat()(torch.stack([one, other], 1))
    assert flat["observation"].tolist() == [0, 1, 5, 6, 100, 101, 102]
    assert flat["_storage_shape"] == [2, 2]


# -- what TorchRL's form has no words for --------------------------------------------------------


@pytest.mark.parametrize("form", ["flat", "nested", "hdf5"])
def test_items_that_do_not_continue_each_other_keep_both_observations(
    form: str, tmp_path: Path
) -> None:
    # Two collectors take turns: no flag marks that slot 1 does not continue slot 0.
    data = steps((0, 1, False), (50, 51, False), (51, 52, True), (1, 2, False))
    if form == "flat":
        saved = TED2Flat()(data)
        assert saved["observation"].tolist() == [0, 1, 50, 51, 52, 1, 2]
        assert saved["_cuts"].tolist() == [0]
        same(Flat2TED()(saved), data)
        return
    saved = TED2Nested()(data)
    assert lists(saved["observation"]) == [[0, 1], [50, 51, 52], [1, 2]]
    assert saved["_cuts"].tolist() == [[True], [False], [False]]
    if form == "hdf5":
        saved = through_hdf5(saved, tmp_path / "form.h5")
    same(Nested2TED()(saved), data)


def test_several_steps_in_an_item_come_back_too() -> None:
    data = stream(30, seed=1)
    data["next", "observation"] = data["next", "observation"].roll(-2, 0)  # as MultiStep does
    same(Flat2TED()(TED2Flat()(data)), data)


def test_a_nan_is_equal_to_itself() -> None:
    data = steps((0, float("nan"), False), (float("nan"), 2, True))
    flat = TED2Flat()(data)
    assert len(flat["observation"]) == 3
    assert flat.get("_cuts", None) is None


@pytest.mark.parametrize("form", ["flat", "nested", "hdf5"])
def test_root_flags_come_back_as_they_were(form: str, tmp_path: Path) -> None:
    def there_and_back(data: TensorDict) -> TensorDict:
        if form == "flat":
            return Flat2TED()(TED2Flat()(data))
        saved = TED2Nested()(data)
        return Nested2TED()(through_hdf5(saved, tmp_path / "f.h5") if form == "hdf5" else saved)

    without = two_episodes().exclude("done")
    same(there_and_back(without), without)
    some = two_episodes()
    some["done"][3] = True
    same(there_and_back(some), some)
    fewer = stream(9, seed=2).exclude("truncated")
    same(there_and_back(fewer), fewer)


@pytest.mark.parametrize("key", [("reward",), ("next", "value"), ("next", "deep", "value")])
def test_entries_that_are_on_one_side_only_stay_there(key: tuple[str, ...]) -> None:
    data, shift, is_full = ring(stream(12, (2,), seed=5), 7)
    data[key] = torch.randn(7, 2)
    same(Flat2TED()(save(TED2Flat(), data, shift, is_full)), data)
    same(Nested2TED()(save(TED2Nested(), data, shift, is_full)), data)


@pytest.mark.parametrize("lanes", LANES)
def test_objects_that_are_no_tensors_stay_with_their_items(
    lanes: tuple[int, ...], tmp_path: Path
) -> None:
    data, shift, is_full = ring(stream(9, lanes, seed=4), 6)

    def words(base: int, sizes: tuple[int, ...]) -> NonTensorStack:
        if len(sizes) == 1:
            return NonTensorStack(*(NonTensorData(f"w{base + at}") for at in range(sizes[0])))
        width = torch.Size(sizes[1:]).numel()
        return NonTensorStack(*(words(base + at * width, sizes[1:]) for at in range(sizes[0])))

    data["text"] = words(0, (6, *lanes))
    data["game"] = NonTensorData("pong", batch_size=data.batch_size)
    for saving, loading in ((TED2Flat(), Flat2TED()), (TED2Nested(), Nested2TED())):
        path = tmp_path / type(saving).__name__
        for saved in (save(saving, data, shift, is_full, path), TensorDict.load_memmap(path)):
            back = loading(saved)
            assert back.get("text").tolist() == data.get("text").tolist()
            assert back["game"] == "pong"
            same(back, data)
    if not lanes:
        assert save(TED2Flat(), data, shift, is_full).get("text").tolist() == [
            "w3", "w4", "w5", "w0", "w1", "w2",
        ]  # fmt: skip


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.int8, torch.bool, torch.float64]
)
def test_any_dtype_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    data = stream(20, seed=6)
    values = torch.randn(21, 3).to(dtype)
    data["a"] = values[:-1]  # before the other entries
    data["next", "a"] = values[1:]
    data = data.select("a", *data.keys())
    same(Flat2TED()(TED2Flat()(data)), data)
    if not dtype.is_complex:  # tensordict maps complex tensors since 0.15 only
        same(Nested2TED()(TED2Nested()(data)), data)


def test_entries_without_bytes_and_without_a_dimension_come_back() -> None:
    data = stream(8, seed=7)
    data["scalar"] = torch.arange(8)
    data["next", "scalar"] = torch.arange(1, 9)
    same(Nested2TED()(TED2Nested()(data)), data)
    data["none"] = torch.zeros(8, 0, 3)
    same(Flat2TED()(TED2Flat()(data)), data)
    with pytest.raises(ValueError, match=r"'none' have shape \[0, 3\] and no bytes.*TED2Flat"):
        TED2Nested()(data)


def test_data_in_pieces_are_taken_too() -> None:
    data = stream(24, (3,), seed=8)[::2, 1]  # strided
    same(Flat2TED()(TED2Flat()(data)), data.contiguous())
    out = torch.zeros_like(stream(12, (3,)))[:, 1]
    same(Flat2TED()(TED2Flat()(data), out=out), data.contiguous())


# -- keys -------------------------------------------------------------------------------------


def test_nested_flags_and_rewards_are_named_by_nested_keys() -> None:
    data = stream(15, seed=9).exclude("reward", ("next", "reward"))
    data["agents"] = TensorDict(
        {"obs": torch.arange(30).view(15, 2), "done": torch.zeros(15, 2, dtype=torch.bool)}, [15, 2]
    )
    data["next", "agents"] = TensorDict(
        {
            "obs": torch.arange(2, 32).view(15, 2),
            "reward": torch.randn(15, 2),
            "done": torch.rand(15, 2) < 0.3,
        },
        [15, 2],
    )
    done_keys = ("done", "terminated", "truncated", ("agents", "done"))
    names = {"done_keys": done_keys, "reward_keys": [("agents", "reward")]}
    flat = TED2Flat(**names)(data)
    assert torch.equal(flat["agents", "reward"], data["next", "agents", "reward"])
    assert len(flat["agents", "done"]) == 15
    assert len(flat["agents", "obs"]) == 15 + int(data["next", "done"][:-1].sum()) + 1
    back = Flat2TED(**names)(flat)
    assert {*back.keys(True, True)} == {*data.keys(True, True)}
    for key in data.keys(True, True):
        assert torch.equal(back[key], data[key]), key


def test_constructor_arguments_are_attributes() -> None:
    hook = TED2Flat(
        done_key=("next", "over"),
        shift_key="s",
        is_full_key="f",
        done_keys=["over", ("a", "over")],
        reward_keys="gain",
    )
    assert (hook.done_key, hook.shift_key, hook.is_full_key) == (("next", "over"), "s", "f")
    assert (hook.done_keys, hook.reward_keys) == ({"over", ("a", "over")}, {"gain"})
    assert Flat2TED().done_key == "done"
    assert TED2Nested().done_key == ("next", "done")
    assert Flat2TED().done_keys == {"done", "truncated", "terminated"}


def test_shift_and_is_full_go_where_they_are_told_to() -> None:
    names = {"shift_key": ("ring", "shift"), "is_full_key": "round"}
    flat = TED2Flat(**names)(two_episodes())
    assert (flat["ring", "shift"], flat["round"]) == (5, True)
    same(Flat2TED(**names)(flat), two_episodes())


def test_another_flag_may_say_that_an_episode_is_over() -> None:
    data = two_episodes().exclude("done")
    data["next", "over"] = data["next", "done"].clone()
    del data["next", "done"]
    flat = TED2Flat(done_key=("next", "over"), done_keys=())(data)
    assert flat["observation"].tolist() == [0, 1, 2, 10, 11, 12, 13]
    same(Flat2TED(done_key="over", done_keys=())(flat), data)


def test_a_done_key_may_be_the_same_on_both_sides() -> None:
    names = {"done_key": ("next", "terminated"), "done_keys": ["done", "terminated", "truncated"]}
    data = stream(9, seed=20)
    data["next", "done"] = data["next", "terminated"].clone()
    same(Flat2TED(**names)(TED2Flat(**names)(data)), data)


# -- files ------------------------------------------------------------------------------------


def test_a_path_makes_the_files_of_tensordict(tmp_path: Path) -> None:
    data, shift, is_full = ring(stream(9, seed=10), 6)
    flat = save(TED2Flat(), data, shift, is_full, tmp_path / "a")
    names = {str(file.relative_to(tmp_path / "a")) for file in (tmp_path / "a").rglob("*.memmap")}
    assert names == {
        "action.memmap", "camera/pixels.memmap", "collector/traj_ids.memmap", "done.memmap",
        "observation.memmap", "reward.memmap", "terminated.memmap", "truncated.memmap",
    }  # fmt: skip
    assert Path(flat["observation"].filename) == tmp_path / "a" / "observation.memmap"
    assert flat.is_memmap()


@pytest.mark.parametrize("form", [TED2Flat, TED2Nested])
def test_files_that_are_there_are_not_written_over(form: Any, tmp_path: Path) -> None:
    data, *_ = ring(stream(9, seed=11), 9)
    save(form(), data, 9, True, tmp_path / "a")
    before = {file: file.read_bytes() for file in (tmp_path / "a").rglob("*") if file.is_file()}
    with pytest.raises(BufferExistsError, match=r"a: is not empty.*pass a new directory"):
        save(form(), data, 4, False, tmp_path / "a")
    assert {file: file.read_bytes() for file in before} == before


# -- the nested form ---------------------------------------------------------------------------


def test_a_row_of_a_nested_tensor_is_a_trajectory() -> None:
    nested = TED2Nested()(two_episodes())
    assert nested.batch_size == (2,)
    assert lists(nested["observation"]) == [[0, 1, 2], [10, 11, 12, 13]]
    assert lists(nested["action"]) == [[0, 10], [20, 30, 40]]
    assert lists(nested["reward"]) == [[[0], [1]], [[2], [3], [4]]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tensor_that_was_nested_by_the_user_is_read_too() -> None:
    nested = TED2Nested()(two_episodes()).to_tensordict()
    parts = nested["observation"].unbind(0)
    nested["observation"] = torch.nested.as_nested_tensor([part.clone() for part in parts])
    same(Nested2TED()(nested), two_episodes())


# -- HDF5 --------------------------------------------------------------------------------------


def test_a_split_has_one_tensordict_for_each_trajectory() -> None:
    split = H5Split()(TED2Nested()(two_episodes()))
    assert split["traj_0", "observation"].tolist() == [0, 1, 2]
    assert split["traj_1", "action"].tolist() == [20, 30, 40]
    assert (split["shift"], split["is_full"], split["_storage_shape"]) == (5, True, [5])


@pytest.mark.full
def test_more_than_ten_trajectories_keep_their_order(tmp_path: Path) -> None:
    data = stream(40, seed=12, ends=0.9)
    split = H5Split()(TED2Nested()(data))
    assert split["traj_00"].batch_size == ()
    same(Nested2TED()(through_hdf5(TED2Nested()(data), tmp_path / "f.h5")), data)


def test_combining_gives_the_nested_form_again() -> None:
    nested = TED2Nested()(two_episodes())
    split = H5Split()(nested)
    split["traj_²"] = split["traj_0"]  # a user's entry without a number
    combined = H5Combine()(split)
    assert combined.batch_size == (2,)
    assert lists(combined["observation"]) == lists(nested["observation"])
    assert combined["shift"] == 5


# -- errors ------------------------------------------------------------------------------------


def test_data_without_the_flag_are_refused() -> None:
    with pytest.raises(ValueError, match=r"done_key=\('next', 'over'\).*no entry with.*next\.done"):
        TED2Flat(done_key=("next", "over"))(two_episodes())


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_a_batch_without_items_is_refused(shape: tuple[int, ...]) -> None:
    data = TensorDict({"next": {"done": torch.zeros(*shape, 1, dtype=torch.bool)}}, shape)
    with pytest.raises(ValueError, match=r"of shape \[.*\] has no items"):
        TED2Flat()(data)


def test_a_flag_for_each_agent_does_not_end_an_episode() -> None:
    data = two_episodes()
    data["next", "done"] = torch.zeros(5, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"shape \[5, 2\], but one value for each of \[5\] items"):
        TED2Flat()(data)


def test_a_done_key_at_the_root_is_refused() -> None:
    with pytest.raises(ValueError, match=r"TED2Flat\(done_key='done'\).*under 'next'"):
        TED2Flat(done_key="done")


@pytest.mark.parametrize("name", ["shift", "is_full", "_storage_shape", "_cuts", "_root"])
def test_an_entry_that_has_one_of_our_names_is_refused(name: str, tmp_path: Path) -> None:
    data = two_episodes()
    data[name] = torch.zeros(5)
    with pytest.raises(ValueError, match=rf"the entries {name}.*rename them"):
        TED2Flat()(data, path=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_data_that_were_not_saved_by_a_hook_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Flat2TED: the data have no entry '_storage_shape'"):
        Flat2TED()(two_episodes())
    with pytest.raises(ValueError, match=r"H5Combine: the data have no entry 'traj_0'.*action"):
        H5Combine()(two_episodes())
    flat = TED2Flat()(two_episodes())
    with pytest.raises(ValueError, match=r"done_key='over'.*no entry with.*observation"):
        Flat2TED(done_key="over")(flat)


def test_an_entry_with_rows_missing_is_refused() -> None:
    flat = TED2Flat()(two_episodes()).to_tensordict()
    flat["observation"] = flat["observation"][:-1]
    with pytest.raises(
        ValueError, match=r"'observation' has 6 rows, but 5 items of 2 traj.*5, or 7"
    ):
        Flat2TED()(flat)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out: out.exclude("action"), r"leaf 'action' of the saved items is not in the targ"),
        (lambda out: out.set("more", torch.zeros(5)), r"target has more, which the saved items do"),
        (lambda out: out.set("action", torch.zeros(5)), r"'action' is torch.float32\[5\] in the t"),
        (lambda out: torch.cat([out, out]), r"\[10\] in the target, and torch\.\w+\[5\]"),
    ],
)
def test_a_target_of_another_form_is_refused_and_not_changed(
    change: Callable[[TensorDict], TensorDict], message: str
) -> None:
    flat = TED2Flat()(two_episodes())
    out = change(torch.zeros_like(two_episodes()))
    with pytest.raises(SchemaMismatchError, match=message):
        Flat2TED()(flat, out=out)
    assert not out["observation"].any()


def test_a_target_need_not_have_the_root_flags_that_torchrl_makes_up() -> None:
    flat = TED2Flat()(two_episodes())
    out = torch.zeros_like(two_episodes().exclude("done"))
    same(Flat2TED()(flat, out=out), two_episodes().exclude("done"))


def test_data_that_hdf5_cannot_restore_are_refused() -> None:
    data = two_episodes()
    data["text"] = NonTensorStack(*"abcde")
    with pytest.raises(TypeError, match=r"'text' contains objects that are not numbers"):
        H5Split()(TED2Nested()(data))
    half = two_episodes()
    half["half"] = torch.zeros(5, dtype=torch.bfloat16)
    with pytest.raises(
        TypeError, match=r"'half' is bfloat16, which HDF5 does not support; convert"
    ):
        H5Split()(TED2Nested()(half))
    slashed = two_episodes()
    slashed["a/b"] = torch.zeros(5)
    with pytest.raises(
        SchemaMismatchError, match=r"H5Split: entry 'a/b': .*'a/b' contains a slash"
    ):
        H5Split()(TED2Nested()(slashed))


def test_a_tensorclass_is_saved_and_filled() -> None:
    data = Step.from_tensordict(two_episodes())
    flat = TED2Flat()(data)
    assert flat["observation"].tolist() == [0, 1, 2, 10, 11, 12, 13]
    out = torch.zeros_like(data)
    assert Flat2TED()(flat, out=out) is out
    same(out.to_tensordict(), two_episodes())
