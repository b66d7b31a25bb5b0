"""Streams: an item's environment within its collector, which is passed with the write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    CompressedListStorage,
    FlatStorageCheckpointer,
    FrameStack,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    NestedStorageCheckpointer,
    NStep,
    PrioritizedSliceSampler,
    ReplayBuffer,
    Sequence,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    Storage,
    StreamingSliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
)
from shmbuffer.memory.format import layout
from tests.kit.rings import ring_of

pytestmark = pytest.mark.product(few=4)

STREAMS, STEPS = 3, 8
END = ("next", "done")


def held(size: int) -> TensorStorage:
    """Makes a storage over existing tensors, without items."""
    storage = TensorStorage(rows(0, size).clone())
    storage.forget(keep_write_count=False)
    return storage


#: Functions that each make a storage of one kind, by the name of the kind.
KINDS: dict[str, Callable[[int, Path], Any]] = {
    "native rows": lambda size, path: LazyTensorStorage(size),
    "native rows in a directory": lambda size, path: LazyMemmapStorage(
        size, scratch_dir=path, shared_init=True
    ),
    "held rows": lambda size, path: held(size),
    "objects": lambda size, path: ListStorage(size),
    "objects without a limit": lambda size, path: ListStorage(),
    "lazy stack": lambda size, path: LazyStackStorage(size),
    "records": lambda size, path: LazyStackStorage(
        size, max_bytes=10**6, scratch_dir=path, shared_init=True
    ),
    "compressed records": lambda size, path: CompressedListStorage(
        size, max_bytes=10**6, scratch_dir=path, shared_init=True
    ),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], Any]:
    return lambda size: KINDS[request.param](size, tmp_path / "buffer")


def rows(step: int, streams: int = STREAMS) -> TensorDict:
    """Makes one step of each stream."""
    done = torch.zeros(streams, 1, dtype=torch.bool)
    return TensorDict(
        {
            "env": torch.arange(streams),
            "step": torch.full((streams,), step),
            "next": TensorDict({"done": done}, [streams]),
        },
        [streams],
    )


def buffer(storage: Storage, slice_len: int = 4, **options: Any) -> TensorDictReplayBuffer:
    sampler = SliceSampler(slice_len=slice_len, end_key=END)
    return TensorDictReplayBuffer(
        storage=storage, sampler=sampler, batch_size=16 * slice_len, **options
    )


def streams_in(rb: ReplayBuffer) -> list[int]:
    """Returns the stream of each slot that holds an item."""
    ring: Any = ring_of(rb)
    found: list[int] = layout.stream_of(ring.live.sources[ring.live.holds()]).tolist()
    return found


def require_whole_slices(sample: Any, slice_len: int = 4) -> None:
    """Checks that each slice has consecutive steps of one stream."""
    env, step = (sample[key].reshape(-1, slice_len) for key in ("env", "step"))
    assert (env == env[:, :1]).all()
    assert (step == step[:, :1] + torch.arange(slice_len)).all()


def test_slices_of_any_storage_follow_one_stream(kind: Callable[[int], Any]) -> None:
    rb = buffer(kind(100))
    for step in range(STEPS):
        index = rb.extend(rows(step), streams=range(STREAMS))
        assert index.tolist() == list(range(STREAMS * step, STREAMS * (step + 1)))
    assert streams_in(rb) == list(range(STREAMS)) * STEPS
    for _ in range(4):
        sample = rb.sample()
        require_whole_slices(sample)
    assert set(sample["env"].tolist()) == set(range(STREAMS))


def test_without_streams_the_items_are_one_sequence(kind: Callable[[int], Any]) -> None:
    rb = buffer(kind(100))
    for step in range(STEPS):
        rb.extend(rows(step))
    assert streams_in(rb) == [0] * STREAMS * STEPS
    env = rb.sample()["env"].view(-1, 4)
    assert (env != env[:, :1]).any()


def steps_of_environments(envs: int, count: int, next_obs: bool = False) -> list[TensorDict]:
    """Makes steps of a vector environment, one row each; a step ends an episode with p = 1/8."""
    random = torch.Generator().manual_seed(0)
    obs, found = torch.rand(envs, 3, generator=random), []
    for _ in range(count):
        after = torch.rand(envs, 3, generator=random)
        done = torch.rand(envs, generator=random) < 1 / 8
        step = TensorDict({"obs": obs, "next": {"done": done}}, [envs])
        step["next_obs" if next_obs else ("next", "obs")] = after
        found.append(step)
        obs = torch.where(done[:, None], torch.rand(envs, 3, generator=random), after)
    return found


MIXED = r"8 places later.*rows of 8 interleaved environments.*streams=range\(8\)"


@pytest.mark.parametrize("next_obs", [False, True])
def test_rows_of_a_vector_environment_without_streams_are_warned_of_once(
    kind: Callable[[int], Any], next_obs: bool
) -> None:
    storage = kind(1_000)
    steps = steps_of_environments(8, 40, next_obs)
    if isinstance(storage, TensorStorage) and storage.initialized:  # over existing tensors
        storage = TensorStorage(torch.cat(steps).clone())
        storage.forget(keep_write_count=False)
    with TensorDictReplayBuffer(
        storage=storage, sampler=SliceSampler(slice_len=2, strict_length=False), batch_size=8
    ) as rb:
        for step in steps:
            rb.extend(step)
        with pytest.warns(UserWarning, match=MIXED) as said:
            rb.sample()
        assert len(said) == 1
        rb.extend(step)
        rb.sample()  # another warning would be an error here


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": lambda: SliceSampler(num_slices=2)},
        {"sampler": lambda: SliceSamplerWithoutReplacement(slice_len=2)},
        {"sampler": lambda: StreamingSliceSampler(slice_len=2)},
        {"sampler": lambda: PrioritizedSliceSampler(1_000, 0.7, 0.9, slice_len=2)},
        {"sample_unit": lambda: Sequence(length=3)},
        {"sample_unit": lambda: NStep(2, 0.9)},
        {"sample_unit": lambda: FrameStack(3, keys=("obs",))},
    ],
    ids=[
        "slices",
        "without replacement",
        "streaming",
        "prioritized",
        "windows",
        "n steps",
        "stacks",
    ],
)
def test_whatever_follows_the_items_of_a_stream_warns_of_mixed_rows(
    options: dict[str, Any],
) -> None:
    for mixed in (False, True):
        made = {name: make() for name, make in options.items()}
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1_000), batch_size=8, **made)
        for step in steps_of_environments(8, 40):
            step["next", "reward"] = torch.ones(8)
            rb.extend(step, streams=None if mixed else range(8))
        if not mixed:
            rb.sample()  # a warning would be an error here
            continue
        with pytest.warns(UserWarning, match=MIXED):
            rb.sample()


def test_a_warning_of_mixed_rows_waits_until_the_items_show_it() -> None:
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(1_000), sampler=SliceSampler(slice_len=2), batch_size=8
    )
    steps = steps_of_environments(100, 8)
    rb.extend(steps[0])
    rb.sample()  # one row for each environment
    for step in steps[1:]:
        rb.extend(step)
    with pytest.warns(UserWarning, match="100 places later"):
        rb.sample()


def test_one_environment_and_rollouts_of_several_are_not_taken_for_mixed_rows() -> None:
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(2_000), sampler=SliceSampler(slice_len=2), batch_size=8
    )
    for step in steps_of_environments(1, 100):
        rb.extend(step)
    rb.sample()
    rb.empty()
    rollout = torch.stack(steps_of_environments(8, 40), 1)
    for environment in rollout:  # one after the other
        rb.extend(environment)
    rb.sample()
    rb.set_sampler(SliceSampler(slice_len=2))
    rb.sample()
    rb.empty()
    rb.extend(rollout, stream_dim=0)
    rb.sample()
    apart = TensorDictReplayBuffer(  # without next observations
        storage=LazyTensorStorage(2_000), sampler=SliceSampler(slice_len=2), batch_size=8
    )
    apart.extend(rollout.exclude(("next", "obs")).reshape(-1))
    apart.sample()


def test_a_stream_goes_on_around_the_end_of_the_ring(kind: Callable[[int], Any]) -> None:
    rb = buffer(kind(20))
    for step in range(40):
        rb.extend(rows(step), streams=np.arange(STREAMS))
    if len(rb) <= 20:
        assert rb[:]["step"].min() >= 33
    for _ in range(4):
        require_whole_slices(rb.sample())


@pytest.mark.parametrize(
    "given",
    [
        [0, 1, 2],
        range(3),
        np.arange(3),
        np.arange(3, dtype=np.uint8),
        torch.arange(3),
        torch.arange(3, dtype=torch.int32),
        np.arange(6)[::2] // 2,
    ],
    ids=lambda given: f"{type(given).__module__}.{getattr(given, 'dtype', type(given).__name__)}",
)
def test_streams_are_any_integers(given: Any) -> None:
    rb = buffer(LazyTensorStorage(10))
    rb.extend(rows(0), streams=given)
    rb.extend(rows(1), streams=given)  # over the fast path
    assert streams_in(rb) == [0, 1, 2] * 2


def test_one_int_is_the_stream_of_the_whole_batch(kind: Callable[[int], Any]) -> None:
    rb = buffer(kind(50))
    for stream in (5, 0, 2**24 - 1, np.int64(7)):
        rb.extend(rows(0), streams=stream)
    rb.add(rows(1)[0], streams=9)
    rb.add(rows(1)[0])
    assert streams_in(rb) == [*[5] * 3, *[0] * 3, *[2**24 - 1] * 3, *[7] * 3, 9, 0]


def test_streams_of_more_items_than_the_ring_holds_are_those_of_the_last() -> None:
    rb = buffer(LazyTensorStorage(4))
    rb.extend(rows(0, 10), streams=range(10))
    assert streams_in(rb) == [8, 9, 6, 7]
    # over the fast path, with more streams than fit on its stack
    rb.extend(rows(0, 300), streams=range(300))
    assert sorted(streams_in(rb)) == [296, 297, 298, 299]
    rb.extend(rows(0, 300), streams=3)
    assert streams_in(rb) == [3] * 4


@pytest.mark.product(few=20)
@pytest.mark.parametrize(
    ("given", "kind_of_error", "said"),
    [
        ([0, 1], ValueError, "2 streams were given for 3 items; pass one number for each item"),
        ([0, 1, 2, 3], ValueError, "4 streams were given for 3 items"),
        ([], ValueError, "0 streams were given for 3 items"),
        ([0, -1, 2], ValueError, "stream -1 at position 1 is not a number from 0 to 16777215"),
        (2**24, ValueError, "stream 16777216 at position 0 is not a number from 0 to 16777215"),
        (-1, ValueError, "stream -1 at position 0"),
        (
            [0.0, 1.0, 2.0],
            TypeError,
            r"with the shape \[n\] of the batch, but has the dtype float64 and the shape \[3\]",
        ),
        (True, TypeError, r"but has the dtype bool and the shape \[\]"),
        ("abc", TypeError, "but has the dtype <U3"),
        ([[0, 1, 2]], TypeError, r"the shape \[n\], but has the shape \[1, 3\]"),
    ],
)
@pytest.mark.parametrize("written", [False, True])
def test_wrong_streams_are_refused_before_anything_is_touched(
    kind: Callable[[int], Any],
    given: Any,
    kind_of_error: type[Exception],
    said: str,
    written: bool,
) -> None:
    rb = buffer(kind(10))
    if written:
        rb.extend(rows(0))
    with pytest.raises(kind_of_error, match=said):
        rb.extend(rows(0), streams=given)
    assert len(rb) == (STREAMS if written else 0)
    if not written and isinstance(rb.storage, (LazyTensorStorage, LazyMemmapStorage)):
        assert rb.storage.ring() is None
    rb.extend(rows(0), streams=[0, 1, 2])
    assert streams_in(rb)[-3:] == [0, 1, 2]


def test_an_item_that_is_added_has_one_stream() -> None:
    rb = buffer(LazyTensorStorage(10))
    rb.add(rows(0)[0], streams=np.array([4]))
    with pytest.raises(ValueError, match="2 streams were given for 1 items"):
        rb.add(rows(0)[0], streams=[1, 2])  # type: ignore[arg-type]
    assert streams_in(rb) == [4]


@pytest.mark.parametrize("dim", [0, 1])
def test_a_leading_dimension_says_which_streams_there_are(
    kind: Callable[[int], Any], dim: int
) -> None:
    rb = buffer(kind(100))
    data = torch.stack([rows(step) for step in range(STEPS)], 1 - dim)
    index = rb.extend(data, stream_dim=dim)
    assert index.shape == data.batch_size
    in_time = index if dim == 1 else index.t()
    assert in_time.flatten().tolist() == list(range(STREAMS * STEPS))
    stored = rb[:]
    assert stored["step"].tolist() == sorted(stored["step"].tolist())
    assert streams_in(rb) == stored["env"].tolist()
    require_whole_slices(rb.sample())
    assert (rb[index.flatten()]["env"].view(index.shape) == data["env"]).all()


def test_dicts_of_arrays_have_a_dimension_of_streams_as_well() -> None:
    rb = buffer(LazyTensorStorage(100))
    data = {"env": np.arange(6).reshape(3, 2), "next": {"done": np.zeros((3, 2, 1), bool)}}
    assert rb.extend(data, stream_dim=0).tolist() == [[0, 3], [1, 4], [2, 5]]
    assert rb[:]["env"].tolist() == [0, 2, 4, 1, 3, 5]
    plain = ReplayBuffer(storage=LazyTensorStorage(100))
    assert plain.extend(torch.arange(6).view(2, 3), stream_dim=1).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert streams_in(plain) == [0, 1, 2] * 2


@pytest.mark.parametrize(
    ("options", "data", "kind_of_error", "said"),
    [
        (
            {"stream_dim": 2},
            rows(0),
            ValueError,
            "stream_dim=2 is not supported by a storage with ndim=1",
        ),
        ({"stream_dim": 0}, rows(0), ValueError, r"two dimensions.*found \[\[3\]\]"),
        ({"stream_dim": 0, "streams": 1}, rows(0), TypeError, "stream_dim cannot be combined"),
        (
            {"stream_dim": 0},
            {"a": np.zeros((2, 3)), "b": np.zeros((2, 4))},
            ValueError,
            r"found \[\[2, 3\], \[2, 4\]\]",
        ),
    ],
)
def test_a_wrong_dimension_of_streams_is_refused(
    options: dict[str, Any], data: Any, kind_of_error: type[Exception], said: str
) -> None:
    rb = buffer(LazyTensorStorage(10))
    with pytest.raises(kind_of_error, match=said):
        rb.extend(data, **options)
    assert rb.storage.ring() is None


def test_lanes_are_streams_already() -> None:
    rb = buffer(LazyTensorStorage(60, ndim=2))
    lanes = torch.stack([rows(step) for step in range(3)], 1)
    for _ in range(2):  # before and after the ring exists
        with pytest.raises(ValueError, match="ndim=2 each lane of a slot is already a separate"):
            rb.extend(lanes, streams=range(3))
        with pytest.raises(ValueError, match="stream_dim=0 is not supported by a storage with"):
            rb.extend(lanes, stream_dim=0)
        rb.extend(lanes)
    for step in range(3, 6):  # two groups of environments take turns
        rb.extend(rows(step).unsqueeze(1), streams=1)
        rb.extend(rows(step).unsqueeze(1), streams=2)
    assert streams_in(rb) == [0] * 6 + [1, 2] * 3
    for _ in range(4):
        sample = buffer_slices(rb, 3)
        assert (sample["env"] == sample["env"][:, :1]).all()
        later = sample["step"][sample["step"][:, 0] >= 3]
        assert (later == torch.arange(3, 6)).all()


def buffer_slices(rb: TensorDictReplayBuffer, slice_len: int) -> TensorDict:
    found = TensorDictReplayBuffer(
        storage=rb.storage, sampler=SliceSampler(slice_len=slice_len, end_key=END), batch_size=48
    ).sample()
    return found.view(-1, slice_len)  # type: ignore[no-any-return]


class Own(Storage):
    """A user's storage."""

    def __init__(self) -> None:
        super().__init__(10)
        self.items: dict[int, Any] = {}

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        self.items.update(zip(cursor.tolist(), data, strict=True))

    def get(self, index: Any) -> Any:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)


def test_who_keeps_no_streams_says_so() -> None:
    for rb in (
        ReplayBuffer(storage=Own()),
        TensorDictReplayBuffer(
            storage=LazyTensorStorage(10), writer=TensorDictMaxValueWriter(rank_key="step")
        ),
    ):
        with pytest.raises(TypeError, match="keeps no streams, because only items that a Round"):
            rb.extend(rows(0), streams=1)
        assert len(rb) == 0
        rb.extend(rows(0))


def test_what_is_changed_where_it_is_keeps_its_stream(kind: Callable[[int], Any]) -> None:
    rb = buffer(kind(10))
    rb.extend(rows(0), streams=[4, 5, 6])
    rb[1] = rows(7)[2]
    rb[0:2] = rows(8)[:2]
    assert streams_in(rb) == [4, 5, 6]
    rb.storage.set(2, rows(9)[0])  # replaces the item
    assert streams_in(rb) == [4, 5, 0]
    rb.empty()
    rb.extend(rows(0))
    assert streams_in(rb) == [0, 0, 0]


def filled(kind: Callable[[int], Any]) -> TensorDictReplayBuffer:
    rb = buffer(kind(20))
    for step in range(10):  # past the end of the ring
        rb.extend(rows(step), streams=[2, 0, 5])
    return rb


def require_the_same_streams(rb: ReplayBuffer, loaded: TensorDictReplayBuffer) -> None:
    assert loaded[:]["step"].tolist() == rb[:]["step"].tolist()
    assert streams_in(loaded) == streams_in(rb)
    for _ in range(4):
        require_whole_slices(loaded.sample())


@pytest.mark.product(few=3)
@pytest.mark.parametrize("name", KINDS)
def test_a_save_keeps_the_streams(name: str, tmp_path: Path) -> None:
    rb = filled(lambda size: KINDS[name](size, tmp_path / "buffer"))
    rb.dumps(tmp_path / "save")
    again = buffer(KINDS[name](20, tmp_path / "again"))
    again.loads(tmp_path / "save")
    require_the_same_streams(rb, again)
    again.extend(rows(10), streams=[2, 0, 5])
    again.dumps(tmp_path / "second")
    other = "objects" if isinstance(rb.storage, ListStorage) else "native rows"
    third = buffer(KINDS[other](40, tmp_path / "third"))
    third.loads(tmp_path / "second")
    assert sorted(streams_in(third)) == sorted(streams_in(again))
    require_whole_slices(third.sample())


@pytest.mark.parametrize("name", KINDS)
def test_a_state_keeps_the_streams(name: str, tmp_path: Path) -> None:
    rb = filled(lambda size: KINDS[name](size, tmp_path / "buffer"))
    again = buffer(KINDS[name](20, tmp_path / "again"))
    again.storage.load_state_dict(rb.storage.state_dict())
    require_the_same_streams(rb, again)


def test_a_save_in_a_directory_of_its_own_keeps_the_streams(tmp_path: Path) -> None:
    path = tmp_path / "save"
    rb = filled(
        lambda size: LazyMemmapStorage(size, scratch_dir=path / "storage", shared_init=True)
    )
    rb.dumps(path)
    rb.close()
    again = buffer(LazyTensorStorage(20))
    again.loads(path)
    assert set(streams_in(again)) == {2, 0, 5}
    require_whole_slices(again.sample())


@pytest.mark.parametrize("checkpointer", [FlatStorageCheckpointer, NestedStorageCheckpointer])
def test_episodes_keep_the_streams(checkpointer: Any, tmp_path: Path) -> None:
    """A change of the stream splits an episode, so that different observations are not merged."""

    def episode(step: int) -> TensorDict:
        data = rows(step)
        data["observation"] = data["env"] * 100.0 + step
        data["next", "observation"] = data["observation"] + 1
        return data

    def storage() -> LazyTensorStorage:
        made = LazyTensorStorage(20)
        made.checkpointer = checkpointer()
        return made

    rb = buffer(storage())
    for step in range(10):
        rb.extend(episode(step), streams=[2, 0, 5])
    rb.dumps(tmp_path / "save")
    again = buffer(storage())
    again.loads(tmp_path / "save")
    require_the_same_streams(rb, again)
    assert (again[:]["next", "observation"] == rb[:]["next", "observation"]).all()


def test_a_list_that_grows_keeps_the_streams_of_its_items() -> None:
    rb = buffer(ListStorage())
    steps = 1200  # more than the first ring of the list
    for first in range(0, steps, 100):
        rb.extend(
            [rows(step)[env] for step in range(first, first + 100) for env in range(STREAMS)],
            streams=[*range(STREAMS)] * 100,
        )
    assert streams_in(rb) == [*range(STREAMS)] * steps
    require_whole_slices(rb.sample())


def test_an_id_that_is_changed_where_it_is_ends_a_trajectory_of_its_stream() -> None:
    sampler = SliceSampler(slice_len=3, traj_key="traj")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(60), sampler=sampler, batch_size=90)
    for step in range(STEPS):
        rb.extend(rows(step).set("traj", torch.arange(STREAMS)), streams=range(STREAMS))
    for _ in range(2):  # once new, once from the cache
        sample = rb.sample()
        require_whole_slices(sample, 3)
    assert set(sample["step"].tolist()) == set(range(STEPS))
    later = torch.arange(4 * STREAMS, STEPS * STREAMS)
    rb.set_at_("traj", later % STREAMS + 10, later)
    for _ in range(2):
        sample = rb.sample()
        require_whole_slices(sample, 3)
        traj = sample["traj"].view(-1, 3)
        assert (traj == traj[:, :1]).all()
        assert set(traj.flatten().tolist()) == {0, 1, 2, 10, 11, 12}


def test_fragments_of_two_streams_are_kept_apart() -> None:
    sampler = SliceSampler(slice_len=2, traj_key="traj", step_key="step", fragmented=True)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(60), sampler=sampler, batch_size=60)
    for step in (2, 0, 1):
        data = rows(step).set("traj", torch.zeros(STREAMS, dtype=torch.int64))
        rb.extend(data, streams=range(STREAMS))
    sample = rb.sample()
    require_whole_slices(sample, 2)
    assert set(sample["env"].tolist()) == set(range(STREAMS))
