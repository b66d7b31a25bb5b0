"""Calls of each public function that takes a path: a table with one row or more per parameter.

A row prepares the files that its call reads, and makes the call. Both functions get the path with
the trap. Other files that they need are below `aside`, out of the way of every trap.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tensordict import TensorDict

import shmbuffer
import shmbuffer.numpy
from shmbuffer import (
    CompressedListStorage,
    HERReplayBuffer,
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    OfflineToOnlineReplayBuffer,
    ReadOnlyStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from shmbuffer.cli import main
from shmbuffer.distributed.keeper import Keeper, open_answer, pickle_constructor
from shmbuffer.distributed.shards.sharded_client import ShardedClient
from tests.distributed.test_shard_saves import Shards

for module in ("matplotlib.backends.backend_agg", "ray", "h5py", "pyarrow.parquet"):
    # Rows that need a missing module are reported later.
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(module)  # import here instead of in each of many children

SIZE = 8
#: Number of seconds for which a call waits for another process.
TIMEOUT = 0.3
Make = Callable[[Path], AbstractContextManager[Any]]
"""Makes an object, with its files below the given directory if it has any."""


@dataclass(frozen=True)
class Call:
    """A way to call a function.

    Attributes:
        run: makes the call.
        prepare: creates what is at the path before the call.
        name: the name of the path.
        error: the error that the call raises in any directory, because it is not supported.
    """

    run: Callable[[Path], object]
    prepare: Callable[[Path], object] = lambda path: None
    name: str = "hostile-run"
    error: type[Exception] | None = None


def aside(path: Path) -> Path:
    """Returns a directory for files to which the path does not lead."""
    return path.parent.parent / "aside"


def items(first: int = 0) -> TensorDict:
    number = torch.arange(first, first + 6)
    goal = number[:, None].float()
    done = (number % 3 == 2)[:, None]
    step = {"done": done, "truncated": torch.zeros_like(done), "observation": goal + 1}
    step |= {"achieved_goal": goal, "reward": goal}
    leaves = {"number": number, "traj": number // 3, "policy_version": number, "observation": goal}
    return TensorDict({**leaves, "desired_goal": goal, "next": step}, [6])


def filled(rb: Any) -> Any:
    if not len(rb):
        rb.extend(items())
    return rb


# -- saves and loads -------------------------------------------------------------------------------


def _closed(make: Callable[[Path], Any]) -> Make:
    """Returns a function that makes a buffer with items, and closes it."""
    return lambda where: closing(filled(make(where)))


def _with(rb: Callable[..., Any], **parts: Callable[[Path], Any]) -> Make:
    return _closed(lambda where: rb(**{name: make(where) for name, make in parts.items()}))


def _tensors(where: Path) -> Any:
    return LazyTensorStorage(SIZE)


def _directory(where: Path) -> Any:
    return LazyMemmapStorage(SIZE, scratch_dir=where / "buffer", shared_init=True)


STORAGES: dict[str, Callable[[Path], Any]] = {
    "CompressedListStorage": lambda where: CompressedListStorage(
        SIZE, max_bytes=2**16, scratch_dir=where / "buffer", shared_init=True
    ),
    "LazyMemmapStorage": _directory,
    "LazyStackStorage": lambda where: LazyStackStorage(
        SIZE, max_bytes=2**16, scratch_dir=where / "buffer", shared_init=True
    ),
    "LazyTensorStorage": _tensors,
    "ListStorage": lambda where: ListStorage(SIZE),
    "Storage": _tensors,
    "TensorStorage": lambda where: TensorStorage(items()),
}
SAMPLERS: dict[str, Callable[[], Any]] = {
    "ConsumingSampler": lambda: shmbuffer.ConsumingSampler(),
    "PrioritizedSampler": lambda: shmbuffer.PrioritizedSampler(SIZE, 0.7, 0.5),
    "PrioritizedSliceSampler": lambda: shmbuffer.PrioritizedSliceSampler(
        SIZE, 0.7, 0.5, slice_len=3, traj_key="traj"
    ),
    "PromptGroupSampler": lambda: shmbuffer.PromptGroupSampler(
        group_key="traj", group_size=3, num_groups=2, consumer="group"
    ),
    "RandomSampler": lambda: shmbuffer.RandomSampler(),
    "Sampler": lambda: shmbuffer.RandomSampler(),
    "SamplerWithoutReplacement": lambda: shmbuffer.SamplerWithoutReplacement(),
    "SliceSampler": lambda: shmbuffer.SliceSampler(slice_len=3, traj_key="traj"),
    "SliceSamplerWithoutReplacement": lambda: shmbuffer.SliceSamplerWithoutReplacement(
        slice_len=3, traj_key="traj"
    ),
    "StalenessAwareSampler": lambda: shmbuffer.StalenessAwareSampler(),
    "StreamingSliceSampler": lambda: shmbuffer.StreamingSliceSampler(
        slice_len=3, end_key=("next", "done"), consumer="windows"
    ),
}
WRITERS: dict[str, Callable[[], Any]] = {
    "RoundRobinWriter": lambda: shmbuffer.RoundRobinWriter(),
    "TensorDictMaxValueWriter": lambda: shmbuffer.TensorDictMaxValueWriter(rank_key="number"),
    "TensorDictRoundRobinWriter": lambda: shmbuffer.TensorDictRoundRobinWriter(),
    "Writer": lambda: shmbuffer.RoundRobinWriter(),
}


def _ensemble(where: Path) -> Any:
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(SIZE)) for _ in range(2)]
    for member in members:
        filled(member)
    return ReplayBufferEnsemble(*members, batch_size=4)


def _offline_to_online(where: Path) -> Any:
    offline = filled(TensorDictReplayBuffer(storage=LazyTensorStorage(SIZE)))
    return OfflineToOnlineReplayBuffer(offline, online_capacity=SIZE, batch_size=4)


def data_set(path: Path) -> Path:
    """Returns a TensorDict in files, which is created if it does not exist."""
    if not path.exists():
        items().memmap(path)
    return path


def _read_only(where: Path) -> Any:
    storage = ReadOnlyStorage(data_set(where / "data set"))
    return TensorDictReplayBuffer(storage=storage, writer=ImmutableDatasetWriter())


BUFFERS: dict[str, Make] = {
    "HERReplayBuffer": _closed(
        lambda where: HERReplayBuffer(lambda rows: rows["desired_goal"], storage=_tensors(where))
    ),
    "OfflineToOnlineReplayBuffer": lambda where: closing(_offline_to_online(where)),
    "PrioritizedReplayBuffer": _closed(
        lambda where: shmbuffer.PrioritizedReplayBuffer(
            alpha=0.7, beta=0.5, storage=_tensors(where)
        )
    ),
    "RemoteTensorDictReplayBuffer": _closed(
        lambda where: shmbuffer.RemoteTensorDictReplayBuffer(storage=_tensors(where))
    ),
    "ReplayBuffer": _with(ReplayBuffer, storage=_tensors),
    "ReplayBufferEnsemble": lambda where: closing(_ensemble(where)),
    "TensorDictPrioritizedReplayBuffer": _closed(
        lambda where: TensorDictPrioritizedReplayBuffer(
            alpha=0.7, beta=0.5, storage=_directory(where)
        )
    ),
    "TensorDictReplayBuffer": _with(TensorDictReplayBuffer, storage=_tensors),
    "RayReplayBuffer": lambda where: _InActor.made(where),
}


class _InActor:
    """The actor of a `RayReplayBuffer` in this process. A handle only sends it the call."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    @classmethod
    @contextmanager
    def made(cls, where: Path) -> Iterator[_InActor]:
        storage = partial(LazyTensorStorage, SIZE)
        parts = pickle_constructor(
            TensorDictReplayBuffer, (), {"storage": storage}, public_name="RayReplayBuffer"
        )
        found = cls(Keeper(parts))
        found.extend(items())
        yield found
        found._ask("leave", ())

    def _ask(self, request: str, args: tuple[Any, ...]) -> Any:
        return open_answer(self._keeper.answer(pickle.dumps((request, args))))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._ask("call", (name, args, kwargs))


def _part(name: str, rb: Make) -> Make:
    """Returns a function that yields a part of a buffer, which stays open in the block."""

    @contextmanager
    def made(where: Path) -> Iterator[Any]:
        with rb(where) as buffer:
            yield getattr(buffer, name)

    return made


def _used(make: Make, method: str) -> Callable[[Path], object]:
    def run(path: Path) -> object:
        with make(aside(path)) as made:
            return getattr(made, method)(path)

    return run


def _saves(name: str, make: Make) -> dict[str, Call]:
    """Returns rows for ``dumps`` and ``loads`` under all their names."""
    save = _used(make, "dumps")
    rows = {
        f"{name}.{method}(path)": Call(_used(make, method)) for method in ("dumps", "dump", "save")
    }
    rows[f"{name}.dumps(path), over a save"] = Call(save, save)
    for method in ("loads", "load"):
        rows[f"{name}.{method}(path)"] = Call(_used(make, method), save)
    return rows


def _of_parts() -> dict[str, Make]:
    found: dict[str, Make] = dict(BUFFERS)
    for name, storage in STORAGES.items():
        found[name] = _part("storage", _with(TensorDictReplayBuffer, storage=storage))
    for name, sampler in SAMPLERS.items():
        parts = {"storage": _tensors, "sampler": lambda where, sampler=sampler: sampler()}
        found[name] = _part("sampler", _with(TensorDictReplayBuffer, **parts))
    for name, writer in WRITERS.items():
        parts = {"storage": _tensors, "writer": lambda where, writer=writer: writer()}
        found[name] = _part("writer", _with(TensorDictReplayBuffer, **parts))
    for part in ("storage", "sampler", "writer"):
        found[f"{part.capitalize()}Ensemble"] = _part(part, BUFFERS["ReplayBufferEnsemble"])
    read_only: Make = lambda where: closing(_read_only(where))  # noqa: E731
    found["ReadOnlyStorage"] = _part("storage", read_only)
    found["ImmutableDatasetWriter"] = _part("writer", read_only)
    return found


# -- checkpointers ---------------------------------------------------------------------------------


def _checkpointer(name: str, storage: Callable[[Path], Any]) -> dict[str, Call]:
    make = _part("storage", _with(TensorDictReplayBuffer, storage=storage))
    if name == "StorageEnsembleCheckpointer":
        make = _part("storage", BUFFERS["ReplayBufferEnsemble"])
    cls = "TensorStorageCheckpointer" if name == "StorageCheckpointerBase" else name

    def called(method: str, *more: object) -> Callable[[Path], object]:
        def run(path: Path) -> object:
            with make(aside(path)) as made:
                return getattr(getattr(shmbuffer, cls)(), method)(made, path, *more)

        return run

    save = called("dumps")
    return {
        f"{name}.dumps(path)": Call(save),
        f"{name}.dumps(path), into a directory": Call(save, lambda path: path.mkdir()),
        f"{name}.loads(path)": Call(called("loads"), save),
        f"{name}.loads_beside(path)": Call(called("loads_beside", None), save),
    }


def _checkpointers() -> dict[str, Call]:
    rows: dict[str, Call] = {}
    for name, storage in {
        "CompressedListStorageCheckpointer": STORAGES["CompressedListStorage"],
        "FlatStorageCheckpointer": _tensors,
        "H5StorageCheckpointer": _tensors,
        "ListStorageCheckpointer": STORAGES["ListStorage"],
        "NestedStorageCheckpointer": _tensors,
        "StorageCheckpointerBase": _tensors,
        "StorageEnsembleCheckpointer": _tensors,
        "TensorStorageCheckpointer": _tensors,
    }.items():
        rows |= _checkpointer(name, storage)
    rows["H5StorageCheckpointer.saves_to_file(path)"] = Call(
        lambda path: shmbuffer.H5StorageCheckpointer().saves_to_file(path)
    )
    for name in ("TED2Flat", "TED2Nested"):
        rows[f"{name}.__call__(path)"] = Call(
            lambda path, name=name: getattr(shmbuffer, name)()(items(), path)
        )
    return rows


# -- Parquet, and data sets ------------------------------------------------------------------------


def _parquet(path: Path) -> None:
    with BUFFERS["TensorDictReplayBuffer"](aside(path)) as rb:
        rb.to_parquet(path)


def _from_parquet(name: str) -> Callable[[Path], object]:
    options: dict[str, Any] = {}
    if "Prioritized" in name:
        options = {"alpha": 0.7, "beta": 0.5}
    if name == "HERReplayBuffer":
        options = {"reward_fn": lambda rows: rows["desired_goal"]}

    def run(path: Path) -> None:
        getattr(shmbuffer, name).from_parquet(path, **options).close()

    return run


_WITHOUT_COLUMNS = ("OfflineToOnlineReplayBuffer", "ReplayBufferEnsemble")


def _columns() -> dict[str, Call]:
    rows = {}
    for name, make in BUFFERS.items():
        of = "TensorDictReplayBuffer" if name == "RayReplayBuffer" else name
        for method, run, prepare in (
            ("to_parquet", _used(make, "to_parquet"), lambda path: None),
            ("from_parquet", _from_parquet(of), _parquet),
        ):
            error = TypeError if name in _WITHOUT_COLUMNS else None
            rows[f"{name}.{method}(path)"] = Call(run, prepare, "run.parquet", error)
    return rows


def _loaded(path: Path, **options: Any) -> None:
    with contextlib.closing(shmbuffer.load_dataset(path, batch_size=2, **options)) as rb:
        rb.sample()


def _converted(path: Path) -> None:
    """Uses the directory at ``path`` for converted data sets."""
    source = aside(path) / "source.parquet"
    if not source.exists():
        _parquet_at(source)
    with closing(shmbuffer.load_dataset(f"parquet:{source}", root=path, batch_size=2)) as rb:
        rb.sample()


def _parquet_at(source: Path) -> None:
    with BUFFERS["TensorDictReplayBuffer"](source.parent) as rb:
        rb.to_parquet(source)
    os.utime(source, (1e9, 1e9))


def _prefilled(path: Path) -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(SIZE), batch_size=2)
    with closing(rb):
        shmbuffer.prefill_replay_buffer(rb, path)


def _offline(path: Path) -> None:
    with closing(OfflineToOnlineReplayBuffer(path, online_capacity=SIZE, batch_size=4)):
        pass


def _read_only_with_priorities(path: Path) -> None:
    ReadOnlyStorage(data_set(aside(path) / "data set"), priorities=path).close()


def _data_sets() -> dict[str, Call]:
    return {
        "load_dataset(dataset_id)": Call(_loaded, data_set),
        "load_dataset(dataset_id), Parquet": Call(
            lambda path: _loaded(f"parquet:{path}", root=aside(path) / "root"),  # type: ignore[arg-type]
            lambda path: _parquet_at(path),
            "run.parquet",
        ),
        "load_dataset(dataset_id), a save": Call(
            _loaded, _used(BUFFERS["TensorDictReplayBuffer"], "dumps")
        ),
        "load_dataset(root)": Call(_converted),
        "load_dataset(root), converted": Call(_converted, _converted),
        "load_dataset(priorities)": Call(
            lambda path: _loaded(data_set(aside(path) / "data set"), priorities=path)
        ),
        "prefill_replay_buffer(dataset)": Call(_prefilled, data_set),
        "OfflineToOnlineReplayBuffer.__init__(offline_dataset)": Call(_offline, data_set),
        "ReadOnlyStorage.__init__(path)": Call(ReadOnlyStorage, data_set),
        "ReadOnlyStorage.__init__(priorities)": Call(_read_only_with_priorities),
    }


# -- directories of buffers ------------------------------------------------------------------------


def _served(path: Path, **options: Any) -> None:
    with shmbuffer.Coordinator(path, timeout=TIMEOUT, **options) as coordinator:
        filled(coordinator.buffer).sample(2)


def buffer(path: Path) -> None:
    """A buffer that is not in use, with items, a consumer, weights and a history."""
    with shmbuffer.Coordinator(path, capacity=SIZE, timeout=TIMEOUT) as coordinator:
        coordinator.buffer.extend(items())
        coordinator.buffer.publish({"w": torch.zeros(4)}, 1)
        sampler = shmbuffer.ConsumingSampler(consumer="learner")
        with closing(shmbuffer.attach(path, sampler=sampler)) as rb:
            rb.sample(2)


def _attached(attach: Callable[..., Any]) -> Callable[[Path], object]:
    def run(path: Path) -> None:
        with closing(attach(path, timeout=TIMEOUT)) as rb:
            rb.sample(2)

    return run


def _storage(path: Path) -> None:
    with closing(
        TensorDictReplayBuffer(
            storage=LazyMemmapStorage(SIZE, scratch_dir=path, shared_init=True, timeout=TIMEOUT)
        )
    ) as rb:
        rb.extend(items())


def _records(kind: type, path: Path) -> None:
    storage = kind(SIZE, max_bytes=2**16, scratch_dir=path, shared_init=True, timeout=TIMEOUT)
    with closing(TensorDictReplayBuffer(storage=storage)) as rb:
        rb.extend(items())


def _weights(path: Path) -> None:
    with closing(shmbuffer.attach(path, timeout=TIMEOUT)) as rb:
        assert rb.newest() is not None
        rb.publish({"w": torch.ones(4)}, 2)


def _consumed(path: Path) -> None:
    sampler = shmbuffer.ConsumingSampler(consumer="learner")
    with closing(shmbuffer.attach(path, sampler=sampler, timeout=TIMEOUT)) as rb:
        rb.sample(2)


def _of_sb3(path: Path) -> None:
    import numpy as np
    from gymnasium import spaces

    from shmbuffer.sb3 import SharedReplayBuffer

    space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    rb = SharedReplayBuffer(SIZE, space, space, scratch_dir=path)
    one = np.zeros((1, 2), np.float32)
    rb.add(one, one, one, np.zeros(1), np.zeros(1), [{}])
    rb.sample(1)
    rb.buffer.close()


def _buffers() -> dict[str, Call]:
    return {
        "Coordinator.__init__(scratch_dir)": Call(partial(_served, capacity=SIZE)),
        "Coordinator.__init__(scratch_dir), recover": Call(
            partial(_served, on_existing="recover"), buffer
        ),
        "Coordinator.__init__(scratch_dir), overwrite": Call(
            partial(_served, capacity=SIZE, on_existing="overwrite", auto_cleanup=True), buffer
        ),
        "attach(scratch_dir)": Call(_attached(shmbuffer.attach), buffer),
        "attach(scratch_dir), weights": Call(_weights, buffer),
        "attach(scratch_dir), a consumer": Call(_consumed, buffer),
        "numpy.attach(scratch_dir)": Call(_attached(shmbuffer.numpy.attach), buffer),
        "recover(scratch_dir)": Call(lambda path: shmbuffer.recover(path, timeout=TIMEOUT), buffer),
        "LazyMemmapStorage.__init__(scratch_dir)": Call(_storage),
        "LazyMemmapStorage.__init__(scratch_dir), again": Call(_storage, _storage),
        "LazyStackStorage.__init__(scratch_dir)": Call(partial(_records, LazyStackStorage)),
        "CompressedListStorage.__init__(scratch_dir)": Call(
            partial(_records, CompressedListStorage)
        ),
        "sb3.SharedReplayBuffer.__init__(scratch_dir)": Call(_of_sb3),
    }


# -- shards ----------------------------------------------------------------------------------------


class _Shard:
    """A shard whose keeper is in this process."""

    def __init__(self, node: str, rb: Any) -> None:
        self.node, self.rb = node, rb
        self.totals = type("Totals", (), {"length": len(rb)})

    def whole(self, method: str, *args: Any) -> Any:
        return getattr(self.rb, method)(*args)


class _Members(Shards):
    """The members of a sharded buffer, all of which are in this process."""

    def refresh(self, **_: object) -> None:
        pass

    def ask_map(self, _: str) -> Any:
        return TensorDictReplayBuffer, (), {"storage": partial(LazyMemmapStorage, SIZE)}


class _ShardedClient(ShardedClient):
    """A handle on two shards without Ray, which would take seconds in each of many trials."""

    rate_limiter = None  # type: ignore[assignment]

    def __init__(self, shards: Shards) -> None:
        self._members, self._begun = shards, []  # type: ignore[assignment]

    def set_rate(self, _: object) -> None:  # type: ignore[override]
        pass


@contextmanager
def _sharded(where: Path) -> Iterator[ShardedClient]:
    with contextlib.ExitStack() as held:
        make = BUFFERS["TensorDictReplayBuffer"]
        yield _ShardedClient(
            _Members(_Shard(node, held.enter_context(make(where))) for node in ("n1", "n2"))
        )


def _shards() -> dict[str, Call]:
    save, load = _used(_sharded, "dumps"), _used(_sharded, "loads")
    return {
        "ShardedReplayBuffer.dumps(path)": Call(save),
        "ShardedReplayBuffer.dumps(path), over a save": Call(save, save),
        "ShardedReplayBuffer.loads(path)": Call(load, save),
    }


# -- the command line ------------------------------------------------------------------------------


class RefusedError(Exception):
    """A command has returned another exit code than 0. The message is its output."""


def verb(*arguments: object) -> None:
    """Runs a command; other errors are raised unchanged."""
    os.environ["SHMBUFFER_DEBUG"] = "1"
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit:  # raised by argparse
            raise RefusedError(shown.getvalue()) from exit
    if code:
        raise RefusedError(shown.getvalue())


def _serve(path: Path) -> None:
    """Serves until SIGTERM, which comes as soon as the buffer exists."""

    class Ready(io.StringIO):
        def write(self, text: str) -> int:
            if "ready" in text:
                threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGTERM)).start()
            return super().write(text)

    with contextlib.redirect_stdout(Ready()):
        main(["serve", str(path), "--capacity", str(SIZE), "--timeout", str(TIMEOUT)])


def _on_a_buffer(*before: object, after: tuple[object, ...] = ()) -> Call:
    return Call(lambda path: verb(*before, path, *after), buffer)


def _buffer_aside(path: Path) -> Path:
    where = aside(path) / "buffer"
    if not where.exists():
        buffer(where)
    return where


def _written(action: str, name: str) -> Call:
    """Returns a row for a command that reads another buffer and writes to the path."""
    return Call(lambda path: verb(action, _buffer_aside(path), path), name=name)


def _verbs() -> dict[str, Call]:
    short = ("--timeout", TIMEOUT)
    rows = {
        "check": _on_a_buffer("check", after=short),
        "consumers": _on_a_buffer("consumers", after=short),
        "inspect": _on_a_buffer("inspect"),
        "list": _on_a_buffer("list"),
        "plot": _on_a_buffer("plot", "--json"),
        "ps": _on_a_buffer("ps"),
        "recover": _on_a_buffer("recover", after=short),
        "serve": Call(_serve),
        "set": _on_a_buffer("set", after=("min_size=1", *short)),
        "stop": _on_a_buffer("stop"),
        "top": _on_a_buffer("top", "--once"),
        "export": Call(lambda path: verb("export", path, aside(path) / "run", *short), buffer),
    }
    found = {f"shmbuffer {name}(dir)": call for name, call in rows.items()}
    found["shmbuffer export(file)"] = _written("export", name="run.h5")
    found["shmbuffer export(file), Parquet"] = _written("export", name="run.parquet")
    found["shmbuffer export(file), TensorDict"] = _written("export", name="hostile-run")
    export = found["shmbuffer export(file), TensorDict"].run
    found["shmbuffer export(file), over one"] = Call(export, export, error=FileExistsError)
    found["shmbuffer plot(output)"] = Call(_plotted, name="run.png")
    found["shmbuffer demo(scratch_dir)"] = Call(_demo)
    found["shmbuffer demo(picture)"] = Call(_pictured, name="run.png")
    return found


def _plotted(path: Path) -> None:
    """Writes an empty picture, because drawing a full one takes seconds."""
    from matplotlib.figure import Figure

    with mock.patch("shmbuffer.watch.plot.report.draw", return_value=Figure()):
        verb("plot", _buffer_aside(path), "-o", path)


def _demo(path: Path) -> None:
    from shmbuffer.examples.command import _directory

    with _directory(path):
        buffer(path / "buffer")


def _pictured(path: Path) -> None:
    from shmbuffer.examples import learning_curve

    learning_curve.save(learning_curve.Curve("title", [(0, 1.0)], [], 2.0), path)


# -- the table -------------------------------------------------------------------------------------


def table() -> dict[str, Call]:
    """Returns rows by parameter. Several rows of one parameter differ by a comma and a word."""
    rows: dict[str, Call] = {}
    for name, make in _of_parts().items():
        rows |= _saves(name, make)
    directory = _with(TensorDictReplayBuffer, storage=_directory)
    rows["TensorDictReplayBuffer.dumps(path), a directory"] = Call(_used(directory, "dumps"))
    return {
        **rows,
        **_checkpointers(),
        **_columns(),
        **_data_sets(),
        **_buffers(),
        **_shards(),
        **_verbs(),
    }


_NEEDS = {
    "RayReplayBuffer": "ray",
    "parquet": "pyarrow",
    "Parquet": "pyarrow",
    "load_dataset(root)": "pyarrow",
    "sb3.": "stable_baselines3",
    "plot(output)": "matplotlib",
    "demo(picture)": "matplotlib",
}
"""Packages of extras, by a part of the names of the rows that need them."""


def missing(row: str) -> set[str]:
    """Returns the packages that a row needs and that are not installed."""
    needed = {package for word, package in _NEEDS.items() if word in row}
    return {package for package in needed if importlib.util.find_spec(package) is None}


ROWS = table()
TABLE = {row: call for row, call in ROWS.items() if not missing(row)}
"""The rows that can be called here."""
