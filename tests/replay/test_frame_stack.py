"""Frame stacks that are assembled at the draw equal stacks that were stored with each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from tensordict import TensorDict, tensorclass

from shmbuffer import (
    CompressedListStorage,
    FrameStack,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    attach,
)
from shmbuffer.storages.movers.stacked_rows import StackedRows
from tests.replay.slice_model import History, Item

pytestmark = pytest.mark.product(few=4)


def steps(first: int, count: int, every: int = 10) -> TensorDict:
    """Makes steps whose frame is their number; every ``every``-th step ends an episode."""
    number = torch.arange(first, first + count)
    after = {
        "obs": film(number + 1),
        "reward": number.float(),
        "done": number % every == every - 1,
    }
    return TensorDict({"obs": film(number), "action": number, "next": after}, [count])


def film(number: torch.Tensor) -> torch.Tensor:
    """Makes frames ``[n, 3, 2]`` that are filled with these numbers."""
    return number[:, None, None].expand(-1, 3, 2).clone()


def buffer(storage: Any, stack: int = 4, **kwargs: Any) -> TensorDictReplayBuffer:
    unit = FrameStack(stack, keys=("obs",))
    return TensorDictReplayBuffer(storage=storage, sample_unit=unit, **kwargs)


def expected(number: int, stack: int, first: int) -> list[int]:
    """Returns the frames of a step whose episode begins, or is stored from, ``first`` on."""
    return [max(number - back, first) for back in reversed(range(stack))]


def require_stacks(
    sample: Any, stack: int = 4, *, every: int = 10, oldest: int = 0, once: bool = True
) -> set[int]:
    """Checks every stack of a sample against the definition; returns the steps of the sample."""
    obs, after = sample["obs"], sample["next", "obs"]
    assert obs.shape == after.shape == (len(sample), stack, 3, 2)
    assert obs.is_contiguous()
    assert after.is_contiguous()
    assert (obs == obs[:, :, :1, :1]).all()
    assert (after == after[:, :, :1, :1]).all()
    for at, number in enumerate(sample["action"].tolist()):
        frames = expected(number, stack, max(number // every * every, oldest))
        assert obs[at, :, 0, 0].tolist() == frames
        assert after[at, :, 0, 0].tolist() == [*frames[1:], number + 1]
    assert torch.equal(sample["next", "reward"], sample["action"].to(sample["next", "reward"]))
    return set(sample["action"].tolist())


STORAGES = {
    "memory": lambda path: LazyTensorStorage(40),
    "directory": lambda path: LazyMemmapStorage(40, scratch_dir=path, shared_init=True),
    "shared next": lambda path: LazyMemmapStorage(
        40, scratch_dir=path, shared_init=True, share_next=True
    ),
    "list": lambda path: ListStorage(40),
    "records": lambda path: LazyStackStorage(
        40, max_bytes=2**16, scratch_dir=path, shared_init=True
    ),
    "compressed": lambda path: CompressedListStorage(
        40, max_bytes=2**16, scratch_dir=path, shared_init=True
    ),
}


@pytest.fixture(params=STORAGES)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return STORAGES[request.param](tmp_path / "buffer")


# -- which stacks there are ------------------------------------------------------------------------


@pytest.mark.product("storage")
@pytest.mark.parametrize("stack", [1, 2, 4])
def test_a_stack_repeats_the_first_frame_and_never_crosses_the_start_of_an_episode(
    storage: Any, stack: int
) -> None:
    rb = buffer(storage, stack)
    rb.extend(steps(0, 7))
    rb.extend(steps(7, 28))
    assert require_stacks(rb.sample(600), stack) == set(range(35))
    rb.close()


@pytest.mark.product("storage")
def test_the_oldest_steps_repeat_the_oldest_frame_that_is_still_there(storage: Any) -> None:
    rb = buffer(storage)
    for first in range(0, 95, 5):
        rb.extend(steps(first, 5, every=1000))
    assert require_stacks(rb.sample(800), every=1000, oldest=55) == set(range(55, 95))
    rb.close()


@pytest.mark.product("make stack")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("stack", [2, 5])
def test_every_stack_is_that_of_the_definition(
    make: Any, stack: int, lanes: int, seed: int
) -> None:
    history, capacity = History(seed, lanes=lanes), 14 + seed
    storage = make(capacity * lanes, ndim=min(lanes, 2))
    unit = FrameStack(stack, keys=("number", ("deep", "frame")))
    rb = TensorDictReplayBuffer(storage=storage, sample_unit=unit, batch_size=60)

    def frames(one: list[Item], at: int) -> list[int]:
        return [one[max(at - back, 0)].number for back in reversed(range(stack))]

    for written in (capacity // 2, 3 * capacity + seed):
        while len(history.rows) < written:
            data = history.steps(min(history.chunk(5), written - len(history.rows)))
            data["name"] = data["number"].clone()
            data["deep", "frame"] = data["number"].unsqueeze(-1).float()
            data["next", "number"] = data["number"] + 1
            rb.extend(data)
        found = {
            item.number: frames(one, at)
            for one in history.trajectories(capacity)
            for at, item in enumerate(one)
        }
        sample = rb.sample()
        names = sample["name"].tolist()
        assert sample["number"].tolist() == [found[name] for name in names]
        assert sample["deep", "frame"].squeeze(-1).tolist() == [found[name] for name in names]
        shifted = [[*found[name][1:], name + 1] for name in names]
        assert sample["next", "number"].tolist() == shifted


@pytest.mark.parametrize("share_next", [False, True])
def test_stacks_are_those_of_gymnasiums_wrapper_on_a_real_environment(
    tmp_path: Path, share_next: bool
) -> None:
    """Frames are observations of CartPole, and the wrapper's stacks are written beside them."""
    env = gymnasium.wrappers.FrameStackObservation(gymnasium.make("CartPole-v1"), 4)
    storage = LazyMemmapStorage(
        300,
        scratch_dir=tmp_path / "b",
        shared_init=True,
        share_next=["obs"] if share_next else False,
    )
    rb = buffer(storage)
    env.action_space.seed(1)
    stacked, _ = env.reset(seed=1)
    for number in range(250):
        after, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        done = torch.tensor(bool(terminated or truncated))
        rb.add(
            TensorDict(
                {
                    "obs": torch.from_numpy(stacked[-1].copy()),
                    "wanted": torch.from_numpy(stacked.copy()),
                    "action": torch.tensor(number),
                    "next": {
                        "obs": torch.from_numpy(after[-1].copy()),
                        "wanted": torch.from_numpy(after.copy()),
                        "reward": torch.tensor(reward),
                        "done": done,
                    },
                },
            )
        )
        stacked = env.reset()[0] if done else after
    sample = rb.sample(4000)
    assert set(sample["action"].tolist()) == set(range(250))
    assert torch.equal(sample["obs"], sample["wanted"])
    assert torch.equal(sample["next", "obs"], sample["next", "wanted"])
    rb.close()
    env.close()


def test_collectors_and_streams_are_never_stacked_together(directory: Any) -> None:
    rb = buffer(directory(40), batch_size=200)
    collectors = [TensorDictReplayBuffer(storage=directory(40)) for _ in range(2)]
    for turn in range(9):
        for who, collector in enumerate(collectors):
            parts = [steps(1000 * (2 * who + env) + turn, 1, every=1000) for env in (0, 1)]
            collector.extend(torch.cat(parts), streams=[0, 1])
    assert len(require_stacks(rb.sample(), every=1000)) == 36
    for one in (*collectors, rb):
        one.close()


def test_without_a_flag_a_stack_goes_on_into_the_next_episode() -> None:
    unit = FrameStack(3, keys=("obs",), done_key=None)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sample_unit=unit)
    rb.extend(steps(0, 30, every=5))
    require_stacks(rb.sample(300), 3, every=1000)


def test_only_the_entry_is_stacked_where_the_next_one_is_not_stored() -> None:
    rb = buffer(LazyTensorStorage(40))
    data = steps(0, 20)
    del data["next", "obs"]
    rb.extend(data)
    sample = rb.sample(100)
    assert sample["obs"].shape == (100, 4, 3, 2)
    assert sample["next"].keys() == {"reward", "done"}


# -- what a sample is ------------------------------------------------------------------------------


def test_priorities_are_those_of_the_step_and_index_is_its_place(tmp_path: Path) -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0,
        beta=1.0,
        storage=LazyMemmapStorage(40, scratch_dir=tmp_path / "b", shared_init=True),
        sample_unit=FrameStack(4, keys=("obs",)),
    )
    rb.extend(steps(0, 30))
    rb.update_priority(torch.arange(30), 0.0)
    rb.update_priority(torch.tensor([3, 17]), torch.tensor([1.0, 3.0]))
    sample = rb.sample(500)
    assert require_stacks(sample) == {3, 17}
    assert torch.equal(sample["index"], sample["action"])
    assert torch.equal(sample["index_generation"], sample["action"])
    weights = torch.where(sample["action"] == 3, 1.0, 1 / 3)
    assert torch.allclose(sample["_weight"] / sample["_weight"].max(), weights)
    sample["td_error"] = (sample["action"] == 3).float()
    assert rb.update_tensordict_priority(sample) == (500, 0)
    assert set(rb.sample(50)["action"].tolist()) == {3}
    rb.close()


def test_a_sample_fills_the_tensors_of_an_old_one(storage: Any) -> None:
    rb = buffer(storage, batch_size=16)
    rb.extend(steps(0, 30))
    out = rb.sample()
    before = {key: value.data_ptr() for key, value in out.items(True, True)}
    if rb.plan.reader is None:
        with pytest.raises(ValueError, match=r"no sample_unit \(except FrameStack\)"):
            rb.sample(out=out)
    else:
        found = set()
        for _ in range(20):
            assert rb.sample(out=out) is out
            found |= require_stacks(out)
            assert torch.equal(out["index"], out["action"])
        assert {key: value.data_ptr() for key, value in out.items(True, True)} == before
        assert len(found) == 30
        fresh = rb.sample(out=TensorDict({"other": torch.zeros(16)}, [16]))
        require_stacks(fresh)
        assert "other" not in fresh
    rb.close()


def test_an_old_sample_of_a_prioritized_buffer_gets_new_weights(tmp_path: Path) -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0,
        beta=1.0,
        storage=LazyMemmapStorage(40, scratch_dir=tmp_path / "b", shared_init=True),
        sample_unit=FrameStack(4, keys=("obs",)),
        batch_size=32,
    )
    rb.extend(steps(0, 30))
    rb.update_priority(torch.arange(30), torch.arange(30) + 1.0)
    out = rb.sample()
    for _ in range(5):
        rb.sample(out=out)
        require_stacks(out)
        assert torch.allclose(out["_weight"], 1.0 / (out["action"] + 1))
        assert out["_weight"] is out["priority_weight"]
    rb.close()


@pytest.mark.parametrize("prefetch", [None, 2])
def test_transforms_and_prefetching_threads_see_stacks(storage: Any, prefetch: int | None) -> None:
    rb = buffer(storage, batch_size=16, prefetch=prefetch)
    rb.append_transform(lambda data: data.set("twice", 2 * data["obs"]))
    rb.extend(steps(0, 30))
    for _ in range(4):
        sample = rb.sample()
        require_stacks(sample)
        assert torch.equal(sample["twice"], 2 * sample["obs"])
    rb.close()


def test_pinned_memory_is_asked_for_the_stacks_themselves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rows are gathered directly into the memory that ``pin_memory`` allocates."""
    from shmbuffer.buffers import replay_buffer
    from shmbuffer.tensors import pinned

    made: list[int] = []

    def empty_like(form: torch.Tensor) -> torch.Tensor:
        made.append((tensor := torch.empty_like(form)).data_ptr())
        return tensor

    monkeypatch.setattr(pinned, "empty_like", empty_like)
    monkeypatch.setattr(pinned, "can_pin", lambda pins: pins)
    monkeypatch.setattr(pinned, "is_pinned", lambda tensor: tensor.data_ptr() in made)
    assert hasattr(replay_buffer, "ReplayBuffer")
    storage = LazyMemmapStorage(40, scratch_dir=tmp_path / "b", shared_init=True)
    rb = buffer(storage, pin_memory=True)
    rb.extend(steps(0, 30))
    sample = rb.sample(16)
    require_stacks(sample)
    assert sample["obs"].data_ptr() in made[:5]
    assert sample["next", "obs"].data_ptr() in made[:5]
    rb.close()


@tensorclass
class Step:
    obs: torch.Tensor
    done: torch.Tensor


@pytest.mark.parametrize("form", ["dict", "tensorclass"])
def test_dicts_and_tensorclasses_are_stacked_as_tensordicts_are(form: str) -> None:
    unit = FrameStack(3, keys=("obs",), done_key="done")
    rb = ReplayBuffer(storage=LazyTensorStorage(40), sample_unit=unit)
    number = torch.arange(20)
    data: Any = {"obs": film(number), "done": number % 10 == 9}
    rb.extend(data if form == "dict" else Step(**data, batch_size=[20]))
    sample, info = rb.sample(100, return_info=True)
    obs = sample["obs"] if form == "dict" else sample.obs
    for row, index in zip(obs[:, :, 0, 0].tolist(), info["index"].tolist(), strict=True):
        assert row == expected(index, 3, index // 10 * 10)


def test_a_collate_fn_sees_the_items_and_the_sample_their_stacks() -> None:
    seen = []

    def collate(items: Any) -> Any:
        seen.append(len(items))
        return items

    rb = buffer(LazyTensorStorage(40), collate_fn=collate)
    rb.extend(steps(0, 30))
    require_stacks(rb.sample(10))
    assert seen == [40]


def test_a_learner_that_attaches_chooses_its_own_stack(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(40, scratch_dir=tmp_path / "b", shared_init=True, share_next=True)
    with TensorDictReplayBuffer(storage=storage) as rb:
        rb.extend(steps(0, 30))
        with attach(tmp_path / "b", sample_unit=FrameStack(2, keys=("obs",))) as learner:
            require_stacks(learner.sample(50), 2)


def test_a_directory_of_single_frames_takes_one_frame_a_step(tmp_path: Path) -> None:
    frame = 84 * 84
    storage = LazyMemmapStorage(
        1000, scratch_dir=tmp_path / "b", shared_init=True, share_next=True, share_next_room=8
    )
    unit = FrameStack(4, keys=("obs",))
    with TensorDictReplayBuffer(storage=storage, sample_unit=unit) as rb:
        film = torch.zeros(11, 84, 84, dtype=torch.uint8)
        after = {"obs": film[1:], "done": torch.zeros(10, dtype=torch.bool)}
        rb.extend(TensorDict({"obs": film[:-1], "next": after}, [10]))
        assert rb.stats()["bytes"] < 1.05 * 1000 * frame
        assert rb.sample(8)["next", "obs"].shape == (8, 4, 84, 84)


# -- others write meanwhile ------------------------------------------------------------------------


@pytest.mark.parametrize("share_next", [False, True])
@pytest.mark.parametrize("way", ["draw", "_given"])
@pytest.mark.parametrize("into", [False, True])
def test_stacks_that_are_overwritten_before_they_are_read_are_drawn_again(
    directory: Any, into: bool, way: str, share_next: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers the native call that draws and reads, and the call that reads what was drawn."""
    others = TensorDictReplayBuffer(storage=directory(12, share_next=share_next))
    others.extend(steps(0, 12))
    rb = buffer(directory(12, share_next=share_next), batch_size=16)
    out = rb.sample() if into else None
    overtaken, then = [], getattr(StackedRows, way)

    def slowly(self: Any, *given: Any) -> Any:
        if len(overtaken) < 3:
            overtaken.append(given)
            others.extend(steps(others.write_count, 11))
        return then(self, *given)

    monkeypatch.setattr(StackedRows, way, slowly)
    if way == "_given":
        monkeypatch.setattr(StackedRows, "draw", lambda *_: None)
    for _ in range(4):
        sample = rb.sample(out=out)
        require_stacks(sample, oldest=others.write_count - 12)
        assert torch.equal(sample["index_generation"], sample["action"])
    assert len(overtaken) == 3
    rb.close()
    others.close()


def test_a_stack_that_is_always_overwritten_is_given_up(
    directory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = TensorDictReplayBuffer(storage=directory(12))
    others.extend(steps(0, 12))
    rb = buffer(directory(12), sampler=RandomSampler())
    given = StackedRows._given

    def slowly(self: Any, index: Any, tickets: Any) -> Any:
        others.extend(steps(others.write_count, 12))
        return given(self, index, tickets)

    monkeypatch.setattr(StackedRows, "_given", slowly)
    monkeypatch.setattr(StackedRows, "draw", lambda *_: None)
    for out in (None, TensorDict({}, [4])):
        with pytest.raises(
            IndexError, match="the items that the RandomSampler chose were overwritten during each"
        ):
            rb.sample(4, out=out)
    rb.close()
    others.close()


def test_one_native_call_draws_and_reads_where_the_buffer_itself_draws(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(40, scratch_dir=tmp_path / "b", shared_init=True)
    rb = buffer(storage)
    rb.extend(steps(0, 30))
    assert "sample: fast\n" in repr(rb.plan)
    rb.append_transform(lambda data: data)
    assert "sample: by parts: transforms are called" in repr(rb.plan)
    rb.close()


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"stack": 0}, ValueError, "stack must be at least 1, got 0"),
        ({"stack": 1.5}, TypeError, "stack"),
        ({"stack": 4, "keys": ()}, ValueError, "keys is empty; pass the names of the entries"),
        ({"stack": 4, "keys": "obs"}, TypeError, "keys must be a sequence of keys.* got 'obs'"),
        (
            {"stack": 4, "keys": (3,)},
            TypeError,
            "keys contains 3, which is not a string or a tuple",
        ),
        ({"stack": 4, "keys": [("next", "obs")]}, ValueError, "name 'obs' alone"),
        ({"stack": 4, "keys": ("obs", ("obs",))}, ValueError, "keys contains an entry twice"),
    ],
)
def test_arguments_that_make_no_stack_are_refused(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        FrameStack(**arguments)


@pytest.mark.parametrize("key", ["frame", "after", ("obs", "deeper")])
def test_items_without_such_a_frame_are_named(storage: Any, key: Any) -> None:
    rb = TensorDictReplayBuffer(storage=storage, sample_unit=FrameStack(4, keys=(key,)))
    data = steps(0, 5)
    data["after"] = data["next"].clone()
    rb.extend(data)
    with pytest.raises(KeyError, match=r"FrameStack: the items have no tensor under .* as keys"):
        rb.sample(2)
    rb.close()


def test_text_is_no_frame() -> None:
    rb = TensorDictReplayBuffer(storage=ListStorage(10), sample_unit=FrameStack(2, keys=("text",)))
    rb.extend([TensorDict({"text": "a", "next": {"done": torch.tensor(False)}}) for _ in range(3)])
    with pytest.raises(KeyError, match="the items have no tensor under 'text'"):
        rb.sample(2)


def test_items_without_the_flag_are_named() -> None:
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(9), sample_unit=FrameStack(4, keys=("a",))
    )
    rb.extend(TensorDict({"a": torch.zeros(3)}, [3]))
    with pytest.raises((KeyError, RuntimeError), match="done"):
        rb.sample(2)


def test_a_unit_says_what_it_is() -> None:
    unit = FrameStack(4, keys=["obs"])
    assert repr(unit) == "FrameStack(4, keys=('obs',), done_key=('next', 'done'))"


def test_expand_names_the_frames_of_each_step(storage: Any) -> None:
    rb = buffer(storage)
    rb.extend(steps(0, 20))
    index, info = FrameStack(4, keys=("obs",)).expand(torch.tensor([11, 7]), {}, rb.storage)
    assert index.tolist() == [10, 10, 10, 11, 4, 5, 6, 7]
    assert torch.equal(info["index_generation"], rb.storage.tickets(index))
    with pytest.raises(IndexError, match="FrameStack: an anchor is not an item of this storage"):
        FrameStack(4).expand(torch.tensor([30]), {}, rb.storage)
    rb.close()
