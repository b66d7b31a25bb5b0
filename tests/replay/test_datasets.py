"""Minari data sets, recorded here with Minari's own collector and read from its files."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shmbuffer import (
    OfflineToOnlineReplayBuffer,
    TensorDictReplayBuffer,
    UnsafePathError,
    load_dataset,
    prefill_replay_buffer,
)
from shmbuffer.datasets import minari as reader
from shmbuffer.extras import MissingExtra
from tests.crash.harness import ended, fork
from tests.damage.hostile import ends_in_time

minari = pytest.importorskip("minari")
gym = pytest.importorskip("gymnasium")

EPISODES = 4


class Walk(gym.Env):
    """A walk along a line whose observations name the episode and the step."""

    def __init__(self, kind: str) -> None:
        self._kind, self._episode = kind, -1
        box = gym.spaces.Box(-1e6, 1e6, (2,), np.float32)
        self.observation_space = {
            "box": box,
            "dict": gym.spaces.Dict({"at": box, "goal": gym.spaces.Discrete(100)}),
            "tuple": gym.spaces.Tuple((box, gym.spaces.Discrete(100))),
        }[kind]
        self.action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._episode, self._step = self._episode + 1, 0
        return self._seen(), {"energy": 0.5, "note": "begun"}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        last = self._step == self._episode + 3
        odd = self._episode % 2 == 1
        info = {"energy": 0.5 + self._step, "note": "going"}
        return self._seen(), float(10 * self._step), last and odd, last and not odd, info

    def _seen(self) -> Any:
        at = np.array([self._episode, self._step], np.float32)
        goal = np.int64(self._episode + 7)
        return {"box": at, "dict": {"at": at, "goal": goal}, "tuple": (at, goal)}[self._kind]


def tree_map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Replaces the only function for which Minari's collector imports JAX."""
    if isinstance(tree, dict):
        return {
            key: tree_map(function, part, *(other[key] for other in others))
            for key, part in tree.items()
        }
    if isinstance(tree, tuple):
        return tuple(
            tree_map(function, part, *(other[at] for other in others))
            for at, part in enumerate(tree)
        )
    return function(tree, *others)


@pytest.fixture(params=["hdf5", "arrow"])
def collect(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Makes a data set with one kind of observations; returns its name."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    functions = ModuleType("jax.tree_util")
    functions.tree_map = tree_map  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jax", ModuleType("jax"))
    monkeypatch.setitem(sys.modules, "jax.tree_util", functions)
    sys.modules["jax"].tree_util = functions  # type: ignore[attr-defined]

    def made(kind: str = "box", episodes: int = EPISODES) -> str:
        name = f"walk/{kind}-v0"
        if name in minari.list_local_datasets():
            minari.delete_dataset(name)
        env = minari.DataCollector(
            Walk(kind), record_infos=kind == "box", data_format=request.param
        )
        for _ in range(episodes):
            env.reset()
            ended = False
            while not ended:
                *_, terminated, truncated, _ = env.step(env.action_space.sample())
                ended = terminated or truncated
        env.create_dataset(dataset_id=name, algorithm_name="none", author="a", author_email="b@c")
        env.close()
        return f"minari:{name}"

    return made


pytestmark = pytest.mark.filterwarnings("ignore")  # Minari warns about missing metadata


def loaded(name: str, tmp_path: Path) -> TensorDictReplayBuffer:
    return load_dataset(name, root=tmp_path / "root", batch_size=50)


def test_steps_lie_in_the_order_of_their_episodes(
    collect: Callable[..., str], tmp_path: Path
) -> None:
    data = loaded(collect(), tmp_path)[:]
    lengths = [episode + 3 for episode in range(EPISODES)]
    episodes = [episode for episode, length in enumerate(lengths) for _ in range(length)]
    steps = [step for length in lengths for step in range(length)]
    assert data["episode"].tolist() == episodes
    assert data["observation"].tolist() == [
        list(pair) for pair in zip(episodes, steps, strict=True)
    ]
    assert torch.equal(data["next", "observation"], data["observation"] + torch.tensor([0.0, 1.0]))
    assert data["next", "reward"].squeeze(-1).tolist() == [10.0 * (step + 1) for step in steps]
    last = torch.tensor(
        [step == lengths[episode] - 1 for episode, step in zip(episodes, steps, strict=True)]
    )
    odd = torch.tensor(episodes) % 2 == 1
    ends = {"done": last, "terminated": last & odd, "truncated": last & ~odd}
    for key, flags in ends.items():
        assert torch.equal(data["next", key], flags[:, None])
    assert data["action"].dtype is torch.int64
    assert data["info", "energy"].tolist() == [0.5 + step for step in steps]
    assert data["next", "info", "energy"].tolist() == [1.5 + step for step in steps]
    assert "note" not in data["info"].keys()  # noqa: SIM118


@pytest.mark.parametrize(
    ("kind", "at", "goal"), [("dict", "at", "goal"), ("tuple", "0", "1")], ids=["dict", "tuple"]
)
def test_observations_of_several_parts_are_nested(
    collect: Callable[..., str], tmp_path: Path, kind: str, at: str, goal: str
) -> None:
    data = loaded(collect(kind), tmp_path)[:]
    assert torch.equal(data["observation", at][:, 0].long(), data["episode"])
    assert torch.equal(data["observation", goal], data["episode"] + 7)
    assert torch.equal(data["next", "observation", at][:, 1], data["observation", at][:, 1] + 1)


def test_it_is_converted_once_for_each_version(collect: Callable[..., str], tmp_path: Path) -> None:
    name = collect()
    one, other = loaded(name, tmp_path), loaded(name, tmp_path)
    assert one.storage.path == other.storage.path  # type: ignore[attr-defined]
    files = {path: path.stat().st_mtime_ns for path in one.storage.path.rglob("*")}  # type: ignore[attr-defined]
    assert files == {path: path.stat().st_mtime_ns for path in files}
    collect(episodes=2)
    assert len(loaded(name, tmp_path)) == 3 + 4
    assert len(one) == 3 + 4 + 5 + 6


@pytest.mark.product(few=1)
def test_who_is_killed_while_it_converts_leaves_nothing_that_counts(
    collect: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, steps = collect(), reader._episodes

    def until_killed(*data: Any) -> Any:
        for at, episode in enumerate(steps(*data)):
            if at == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield episode

    monkeypatch.setattr(reader, "_episodes", until_killed)
    assert ended(fork(lambda: loaded(name, tmp_path) and None)) == -signal.SIGKILL
    monkeypatch.setattr(reader, "_episodes", steps)
    assert len(loaded(name, tmp_path)) == 3 + 4 + 5 + 6
    made = [path.name for path in (tmp_path / "root" / "minari").glob("[!.]*")]
    assert len(made) == len([*(tmp_path / "root" / "minari").iterdir()]) - 1 == 1


@pytest.mark.product(few=1)
def test_one_process_converts_and_the_others_wait(
    collect: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, steps = collect(), reader._episodes
    began, begun = os.pipe()

    def noted(*data: Any) -> Any:
        os.write(begun, b"x")
        yield from steps(*data)

    monkeypatch.setattr(reader, "_episodes", noted)
    children = [fork(lambda: len(loaded(name, tmp_path)) and None) for _ in range(3)]
    assert [ended(child) for child in children] == [0, 0, 0]
    assert os.read(began, 9) == b"x"
    os.close(began)
    os.close(begun)


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Makes an HDF5 data set of two episodes of four steps; returns its name."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))

    def made(observations: Any, space: Any, **columns: Any) -> str:
        ends = np.arange(4) == 3
        episode = {
            "observations": observations,
            "actions": np.zeros(4, np.int64),
            "rewards": np.arange(4.0),
            "terminations": ends,
            "truncations": np.zeros(4, np.bool_),
            **columns,
        }
        episodes = [minari.data_collector.EpisodeBuffer(id=at, **episode) for at in range(2)]
        minari.create_dataset_from_buffers(
            "made/short-v0",
            episodes,
            observation_space=space,
            action_space=gym.spaces.Discrete(3),
        )
        return "minari:made/short-v0"

    return made


BOX = gym.spaces.Box(-9, 9, (), np.float64)
LOSES = r"^minari:made/short-v0: "


def test_an_observation_for_each_step_is_kept_and_the_last_one_repeated_with_a_warning(
    record: Callable[..., str], tmp_path: Path
) -> None:
    name = record(np.arange(4.0), BOX)
    said = (
        f"{LOSES}Column 'next.observation' is incomplete because .* last known "
        "observation is repeated"
    )
    with pytest.warns(UserWarning, match=said):
        data = loaded(name, tmp_path)[:]
    assert data["observation"].tolist() == [0, 1, 2, 3] * 2
    assert data["next", "observation"].tolist() == [1, 2, 3, 3] * 2
    assert data["next", "done"].squeeze(-1).tolist() == [False, False, False, True] * 2


def test_infos_of_the_steps_alone_are_kept_under_next(
    record: Callable[..., str], tmp_path: Path
) -> None:
    name = record(np.arange(5.0), BOX, infos={"energy": np.arange(4)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = load_dataset(name, root=tmp_path / "root", batch_size=50, strict=True)[:]
    assert data["next", "info", "energy"].tolist() == [0, 1, 2, 3] * 2
    assert "info" not in data.keys()  # noqa: SIM118
    assert data["next", "observation"].tolist() == [1, 2, 3, 4] * 2


@pytest.mark.parametrize(
    ("observations", "space", "infos", "column", "why"),
    [
        (list("abcde"), gym.spaces.Text(9), None, "observation", "it contains text"),
        (
            {"at": np.arange(5.0), "said": list("bcdef")},
            gym.spaces.Dict({"at": BOX, "said": gym.spaces.Text(9)}),
            None,
            "observation.said",
            "it contains text",
        ),
        (np.arange(7.0), BOX, None, "observation", "it has 7 rows, but .* has 4 steps"),
        (
            np.arange(5.0),
            BOX,
            {"a": {"note": list("abcde")}},
            "info.a.note",
            "it contains text",
        ),
        (np.arange(5.0), BOX, {"count": 3}, "info.count", "it has one value per episode"),
        (
            np.arange(5.0),
            BOX,
            {"last": np.arange(3)},
            "info.last",
            "it has 3 rows, but .* has 4 steps",
        ),
    ],
)
def test_a_column_that_makes_no_batch_is_left_out_with_a_warning_or_refused(
    record: Callable[..., str],
    tmp_path: Path,
    observations: Any,
    space: Any,
    infos: Any,
    column: str,
    why: str,
) -> None:
    name = record(observations, space, infos=infos)
    said = rf"{LOSES}Column '{column}' is left out because {why}"
    with pytest.raises(ValueError, match=said):
        load_dataset(name, root=tmp_path / "root", batch_size=50, strict=True)
    assert list((tmp_path / "root" / "minari").iterdir()) == [tmp_path / "root/minari/.lock"]
    for _ in range(2):  # also for a conversion that exists already
        with pytest.warns(UserWarning, match=said) as warned:
            data = loaded(name, tmp_path)[:]
        assert len([one for one in warned if "made/short" in str(one.message)]) == 1
        assert tuple(column.split(".")) not in data.keys(True)
        assert data["next", "reward"].squeeze(-1).tolist() == [0, 1, 2, 3] * 2
    with pytest.raises(ValueError, match=said):
        load_dataset(name, root=tmp_path / "root", batch_size=50, strict=True)


def test_rows_of_different_shapes_and_objects_are_named(tmp_path: Path) -> None:
    episode = SimpleNamespace(
        id=0,
        rewards=[0.0, 1.0],
        terminations=[False, True],
        truncations=[False, False],
        actions=([0, 1], [[0], [1, 2]]),
        observations=np.array([[1], [1, 2], [1, 2, 3]], object),
        infos={"day": np.array(["2000-01-01"] * 3, "datetime64[D]"), "none": None},
    )
    losses: dict[str, str] = {}
    data = reader._steps_of(episode, losses)
    assert losses == {
        "action.1": "Column 'action.1' is left out because its rows have different shapes.",
        "observation": "Column 'observation' is left out because its rows have different shapes.",
        "info.day": "Column 'info.day' is left out because its rows are of type datetime64, but "
        "tensors contain numbers.",
    }
    assert data["action", "0"].tolist() == [0, 1]


def test_data_of_a_file_of_hdf5_that_are_in_another_file_are_not_read(
    record: Callable[..., str], tmp_path: Path
) -> None:
    h5py = pytest.importorskip("h5py")
    name = record(np.arange(5.0), BOX)
    (tmp_path / "precious").write_bytes(bytes(4 * 8))
    os.mkfifo(tmp_path / "fifo")
    file = tmp_path / "minari/made/short-v0/data/main_data.hdf5"

    def external_bytes(group: Any) -> None:
        group.create_dataset("rewards", (4,), "f8", external=[(tmp_path / "precious", 0, 32)])

    def external_link(group: Any) -> None:
        group["rewards"] = h5py.ExternalLink(tmp_path / "fifo", "/x")

    def virtual(group: Any) -> None:
        layout = h5py.VirtualLayout((4,), "f8")
        layout[:] = h5py.VirtualSource(str(tmp_path / "fifo"), "x", (4,))
        group.create_virtual_dataset("rewards", layout)

    for number, put in enumerate((external_bytes, external_link, virtual)):
        with h5py.File(file, "a") as opened:
            del opened["episode_1"]["rewards"]
            put(opened["episode_1"])
            opened["episode_1"]["itself"] = opened["episode_1"]

        def load() -> None:
            with pytest.raises(UnsafePathError, match=r"episode_1/rewards are in another file"):
                loaded(name, tmp_path)

        assert ends_in_time(load) == 0, number
        with h5py.File(file, "a") as opened:
            del opened["episode_1"]["itself"]


def test_it_is_mixed_with_what_is_collected(collect: Callable[..., str], tmp_path: Path) -> None:
    rb = OfflineToOnlineReplayBuffer(
        collect(), online_capacity=50, offline_fraction=0.25, batch_size=8, root=tmp_path / "root"
    )
    data = rb.offline_buffer[:]
    rb.extend(data.clone().set("observation", data["observation"] + 1000))
    sample = rb.sample()
    assert (sample["observation"][:, 0] >= 1000).tolist() == [False] * 2 + [True] * 6


def test_it_is_copied_by_its_name(
    collect: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    name = collect()
    from shmbuffer import LazyTensorStorage

    rb = prefill_replay_buffer(
        TensorDictReplayBuffer(storage=LazyTensorStorage(100)), name, n_samples=5
    )
    assert rb[:]["episode"].tolist() == [0, 0, 0, 1, 1]
    assert (tmp_path / ".cache" / "shmbuffer" / "minari").is_dir()


def test_a_data_set_that_is_not_here_is_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="walk/none-v0"):
        load_dataset("minari:walk/none-v0", batch_size=4)


def test_without_minari_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(MissingExtra, match=r"needs minari, .* pip install .*\[minari\]"):
        load_dataset("minari:walk/none-v0", batch_size=4)
