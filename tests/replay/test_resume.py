"""A save holds everything that a run resumes with, so that the rest repeats bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    CorruptBufferError,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from shmbuffer._native import _core
from shmbuffer.memory.format.layout import PARTS
from tests.crash.test_save_points import points
from tests.kit.rings import engine_of, ring_of
from tests.replay.resuming import CASES, ROOT, SAVED_AT, STEPS, Case, Loop, items

pytestmark = pytest.mark.product(few=4)

Steps = list[dict[str, torch.Tensor]]


class Runs(NamedTuple):
    """The steps of one run: without a save, after its save, and after its resumption."""

    never_saved: Steps
    saved: Steps
    resumed: Steps


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[str, Runs]]:
    """Returns the runs of each selected case; one process resumes all of them."""
    given = [getattr(item, "callspec", None) for item in request.session.items]
    cases = [one.params["case"] for one in given if one and one.params.get("case") in CASES]
    folder = Path(f"/dev/shm/shmbuffer-resume-{os.getpid()}")
    found = {}
    try:
        for case in cases:
            each = []
            for run in ("never", "saved"):
                here = folder / case.name
                (here / run).mkdir(parents=True)
                loop = Loop(case, here / run)
                loop.begin()
                for _ in range(SAVED_AT):
                    loop.next()
                if run == "saved":
                    loop.save(here / "save")
                each.append(loop.rest())
                loop.close()
            found[case.name] = each
        command = [sys.executable, "-m", "tests.replay.resuming", str(folder)]
        subprocess.run(command, check=True, cwd=ROOT, timeout=200)
        yield {
            name: Runs(*each, torch.load(folder / name / "resumed.pt"))
            for name, each in found.items()
        }
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)


def require_same(found: Steps, expected: Steps) -> None:
    assert len(found) == len(expected) == STEPS - SAVED_AT
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.keys() == other.keys(), step
        for key, value in one.items():
            assert value.dtype == other[key].dtype, (step, key)
            assert torch.equal(value, other[key]), (step, key)


@pytest.mark.product(few=6)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_resumed_run_samples_what_the_uninterrupted_one_does(
    runs: dict[str, Runs], case: Case
) -> None:
    each = runs[case.name]
    require_same(each.saved, each.never_saved)
    require_same(each.resumed, each.never_saved)
    keys = each.resumed[0].keys()
    assert ("index_generation" in keys) == (case.place != "memory")
    assert ("_weight" in keys) == case.sampler.startswith("prioritized")


# -- what the user saves with it ------------------------------------------------------------------


def filled(**options: Any) -> TensorDictReplayBuffer:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(64), batch_size=8, **options)
    rb.extend(items(0, 40))
    return rb


def empty(**options: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=LazyTensorStorage(64), batch_size=8, **options)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    network = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(network.parameters(), betas=(0.8, 0.99))
    network(torch.arange(8.0).view(2, 4)).sum().backward()
    optimizer.step()
    return network, optimizer


def same(one: Any, other: Any) -> bool:
    """True if two values have the same types at all levels and are equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (torch.Tensor, np.ndarray, np.generic)):
        return one.dtype == other.dtype and bool((one == other).all())
    return bool(one == other) or one != one


def test_network_optimizer_and_random_states_come_back_with_the_buffer(tmp_path: Path) -> None:
    network, optimizer = trained()
    numpy_state = np.random.default_rng(3).bit_generator.state  # has integers of 128 bits
    extra = {
        "model": network.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": {"torch": torch.get_rng_state(), "numpy": numpy_state, "python": random.getstate()},
        "step": 17,
        "loss": [0.5, float("inf"), None, True, "text", b"bytes", 2 + 3j],
        "array": np.arange(6, dtype=np.float16).reshape(2, 3),
        "last": np.float32(0.25),
        "dtype": torch.bfloat16,
        7: {"nested": [{}, [], (), torch.empty(0, 3), torch.tensor(2.0, dtype=torch.bfloat16)]},
    }
    filled().dumps(tmp_path, extra=extra)
    rb = empty()
    found = rb.loads(tmp_path)
    assert same(found, {**extra, "model": OrderedDict(extra["model"])})
    again, its_optimizer = trained()
    again.load_state_dict(found["model"])
    its_optimizer.load_state_dict(found["optimizer"])
    assert same(its_optimizer.state_dict(), optimizer.state_dict())
    random.setstate(found["rng"]["python"])
    torch.set_rng_state(found["rng"]["torch"])
    assert len(rb) == 40
    assert not list(tmp_path.rglob("*.pkl"))


@pytest.mark.parametrize("name", ["save", "dump"])
def test_the_other_names_of_dumps_and_loads_know_of_it(tmp_path: Path, name: str) -> None:
    getattr(filled(), name)(tmp_path, extra=[1, 2])
    assert empty().load(tmp_path) == [1, 2]


def test_a_save_without_it_gives_none_and_leaves_none_of_an_earlier_one(tmp_path: Path) -> None:
    rb = filled()
    rb.dumps(tmp_path, extra={"step": 1})
    assert rb.loads(tmp_path) == {"step": 1}
    rb.dumps(tmp_path)
    assert rb.loads(tmp_path) is None
    assert not list((tmp_path / "storage" / PARTS).glob("extra*"))


def test_what_is_left_below_a_save_by_torchrl_is_not_taken_for_part_of_it(tmp_path: Path) -> None:
    """TorchRL overwrites our metadata with its own and leaves files that it does not know."""
    rb = filled(prefetch=2)
    rb.sample()
    rb.dumps(tmp_path, extra={"step": 1}, layout="torchrl")
    assert list((tmp_path / PARTS).glob("ahead*"))
    (tmp_path / "buffer_metadata.json").write_text('{"batch_size": 8}')
    assert empty(prefetch=2).loads(tmp_path) is None


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"model": {"loss": max}}, r"extra\['model'\]\['loss'\] is <built-in function max>"),
        ([1, (2, object())], r"extra\[1\]\[1\] is <object .* type object, .* only be saved by pic"),
        (torch.nn.Linear(2, 2), r"extra is Linear.* of type Linear"),
        ({"a": {frozenset(): 1}}, r"extra\['a'\] has the key frozenset\(\) of type frozenset"),
        ({"a": np.array([object()])}, r"extra\['a'\] is array.* of type ndarray"),
        ({"a": torch.eye(2).to_sparse()}, r"extra\['a'\] is a tensor of layout torch.sparse_coo"),
        ({"a": torch.empty(2, device="meta")}, r"extra\['a'\] is a tensor .* on meta"),
        (TensorDict({"a": {"b": torch.ones(2)}, "c": max}, []), r"extra\['c'\]"),
    ],
)
def test_what_could_only_be_pickled_is_named_before_anything_is_written(
    tmp_path: Path, extra: Any, says: str
) -> None:
    with pytest.raises(TypeError, match=says) as error:
        filled().dumps(tmp_path / "save", extra=extra)
    assert "Nothing was written" in str(error.value)
    assert not (tmp_path / "save").exists()


def deep(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {"state": torch.ones(1)}
    for _ in range(levels - 1):
        found = {"inner": found}
    return found


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"model": deep(3000)}, r"extra\['model'\]\['inner'\].* is nested deeper than 128 levels"),
        ({"count": [1, 10**4300]}, r"extra\['count'\]\[1\] is an int of 14,285 bits"),
        ({"count": {(0, 10**5000): 1}}, r"a key of extra\['count'\] is an int of 16,610 bits"),
    ],
)
def test_what_json_cannot_hold_is_named_before_anything_is_written(
    tmp_path: Path, extra: Any, says: str
) -> None:
    with pytest.raises(ValueError, match=says) as error:
        filled().dumps(tmp_path / "save", extra=extra)
    assert "Nothing was written" in str(error.value)
    assert not (tmp_path / "save").exists()


def test_the_deepest_tree_and_the_longest_number_come_back(tmp_path: Path) -> None:
    extra = {"deep": deep(127), "long": 1 - 2**14284, 2**200: (-(2**64), 2**64)}
    filled().dumps(tmp_path, extra=extra)
    assert same(empty().loads(tmp_path), extra)


def test_what_holds_itself_is_refused(tmp_path: Path) -> None:
    extra: dict[str, Any] = {"a": {}}
    extra["a"]["b"] = extra
    with pytest.raises(TypeError, match=r"extra\['a'\]\['b'\] contains itself"):
        filled().dumps(tmp_path / "save", extra=extra)


@pytest.mark.parametrize("name", ["extra", "ahead", "sampler", "writer", "buffer"])
@pytest.mark.parametrize("damage", ["no lines", "no data", "cut", "changed", "another format"])
def test_damage_is_named_and_nothing_is_changed(tmp_path: Path, name: str, damage: str) -> None:
    rb = filled(prefetch=2)
    rb.sample()
    rb.dumps(tmp_path, extra={"step": torch.arange(100)})
    folder = tmp_path / "storage" / PARTS
    lines, data = folder / f"{name}.jsonl", folder / f"{name}.data"
    match damage:
        case "no lines":
            lines.unlink()
        case "no data":
            data.unlink()
        case "cut":
            os.truncate(data, 8)
        case "changed":
            lines.write_text(lines.read_text().replace('"int64"', '"int32"'))
        case "another format":
            lines.write_text(lines.read_text().replace('{"format": 1}', '{"format": 9}'))
    other = empty(prefetch=2)
    other.extend(items(7, 3))
    with pytest.raises((CorruptBufferError, FileNotFoundError), match=str(tmp_path)):
        other.loads(tmp_path)
    assert other[:]["number"].tolist() == [7, 8, 9]


SAVE_POINTS = [point for point in points() if point.startswith("save.")]


@pytest.mark.full
@pytest.mark.crash
@pytest.mark.parametrize("before", ["a save", "foreign files"])
def test_a_save_that_is_killed_leaves_the_one_before_with_its_own_extra(
    fast_path: Path, before: str, full: bool
) -> None:
    """A load never combines the items of one save with the networks of another."""
    path, passed = fast_path / "save", set()
    passings = (0, 5) if full or before == "a save" else (0,)

    def save(step: int) -> None:
        rb = empty(prefetch=2, generator=torch.Generator().manual_seed(step))
        rb.extend(items(100 * step, 20 + step))
        rb.sample()
        network = torch.full((1000,), float(step))
        rb.dumps(path, extra={"step": step, "model": {"weight": network}})

    for point in SAVE_POINTS:
        for passing in passings:
            subprocess.run(["rm", "-rf", str(path)], check=True)
            if before == "foreign files":
                path.mkdir()
                (path / "notes").write_text("mine")
            save(1)
            pid = os.fork()
            if not pid:
                try:
                    _core.arm(point, after=passing)
                    save(2)
                finally:
                    os._exit(0)
            if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL:
                passed.add(point)
            rb = empty(prefetch=2)
            extra = rb.loads(path)
            step = extra["step"]
            assert step in (1, 2), point
            assert torch.equal(extra["model"]["weight"], torch.full((1000,), float(step))), point
            assert rb[:]["number"].tolist() == list(range(100 * step, 100 * step + 20 + step))
            assert (rb.sample()["number"] // 100 == step).all(), point
            if before == "foreign files":
                assert (path / "notes").read_text() == "mine"
    expected = {"save.made", "save.written", "save.listed", "save.synced"}
    expected |= {"save.replaced" if before == "a save" else "save.complete"}
    assert expected <= passed


# -- batches that were made ahead -----------------------------------------------------------------


def test_batches_of_a_save_come_first_and_are_taken_back_like_others(tmp_path: Path) -> None:
    rb = filled(
        prefetch=3,
        sampler=SamplerWithoutReplacement(),
        generator=torch.Generator().manual_seed(0),
    )
    rb.sample()
    rb.dumps(tmp_path)
    expected = [rb.sample()["number"].tolist() for _ in range(4)]
    other = empty(prefetch=3, sampler=SamplerWithoutReplacement())
    other.loads(tmp_path)
    assert other.stats()["prefetch_queue_size"] == 3
    assert other.sample()["number"].tolist() == expected[0]
    other.state_dict()  # returns prefetched batches
    assert other.stats()["prefetch_queue_size"] == 0
    assert [other.sample()["number"].tolist() for _ in range(3)] == expected[1:]
    assert other.sampler.ran_out or len(other) == 40


def test_a_buffer_that_makes_nothing_ahead_draws_them_again(tmp_path: Path) -> None:
    rb = filled(prefetch=3, generator=torch.Generator().manual_seed(0))
    rb.sample()
    rb.dumps(tmp_path)
    expected = [rb.sample()["number"].tolist() for _ in range(6)]
    other = empty()
    other.loads(tmp_path)
    assert [other.sample()["number"].tolist() for _ in range(6)] == expected


def test_items_that_have_other_places_now_are_drawn_again(tmp_path: Path) -> None:
    rb = empty(prefetch=3)
    rb.extend(items(0, 100))  # the ring has wrapped around
    rb.sample()
    rb.dumps(tmp_path)
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(80), batch_size=8, prefetch=3)
    other.loads(tmp_path)
    assert other.stats()["prefetch_queue_size"] == 0
    batch = other.sample()
    assert torch.equal(other[batch["index"]]["number"], batch["number"])


def test_a_batch_of_objects_is_drawn_again(tmp_path: Path) -> None:
    rb = filled(prefetch=2, transform=lambda data: data.set_non_tensor("what", object()))
    rb.sample()
    rb.dumps(tmp_path)
    assert rb.stats()["prefetch_queue_size"] == 0
    assert not list(tmp_path.glob("shmbuffer.ahead*"))
    assert empty(prefetch=2).loads(tmp_path) is None


def test_a_batch_that_could_not_be_made_is_no_part_of_a_save(tmp_path: Path) -> None:
    calls = iter(range(100))

    def fails(data: TensorDict) -> TensorDict:
        if next(calls) == 2:
            raise ValueError("this one")
        return data

    rb = filled(prefetch=1, transform=fails, generator=torch.Generator().manual_seed(0))
    rb.sample()
    rb.sample()  # the third batch is waiting and has failed
    rb.dumps(tmp_path)
    assert rb.stats()["prefetch_queue_size"] == 0
    expected = rb.sample()["number"].tolist()
    other = empty()
    other.loads(tmp_path)
    assert other.sample()["number"].tolist() == expected


# -- tickets --------------------------------------------------------------------------------------


def shared(path: Path, size: int = 32) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=LazyMemmapStorage(size, scratch_dir=path),
        sampler=PrioritizedSampler(size, 1.0, 1.0),
        batch_size=8,
    )


def test_items_have_the_tickets_that_they_had_in_a_new_ring(fast_path: Path) -> None:
    with shared(fast_path / "a") as rb, shared(fast_path / "b") as other:
        rb.extend(items(0, 77))
        rb[3] = items(1000, 1)[0]  # has a ticket of a later lap
        rb.dumps(fast_path / "save")
        other.loads(fast_path / "save")
        assert ring_of(other).head == ring_of(rb).head
        assert (ring_of(other).live.tickets() == ring_of(rb).live.tickets()).all()
        batch = rb.sample()
        batch["td_error"] = torch.ones(8)
        assert other.update_tensordict_priority(batch).applied == 8
        assert rb.extend(items(0, 5)).tolist() == other.extend(items(0, 5)).tolist()
        assert (ring_of(other).live.tickets() == ring_of(rb).live.tickets()).all()
        assert engine_of(other).check().ok


def test_a_ring_that_is_past_them_gives_those_of_a_later_lap(fast_path: Path) -> None:
    """A ticket is used once: samples from before the load are stale after it."""
    with shared(fast_path / "a") as rb:
        rb.extend(items(0, 40))
        rb.dumps(fast_path / "save")
        tickets, head = ring_of(rb).live.tickets(), ring_of(rb).head
        rb.extend(items(40, 1000))
        batch = rb.sample()
        batch["td_error"] = torch.ones(8)
        past = ring_of(rb).head
        rb.loads(fast_path / "save")
        later = ring_of(rb).live.tickets() - tickets
        assert set(later.tolist()) == {ring_of(rb).head - head}
        assert ring_of(rb).live.tickets().min() >= past
        assert later[0] % 32 == 0
        assert rb.update_tensordict_priority(batch) == (0, 8)
        assert engine_of(rb).check().ok


def test_items_that_were_placed_one_by_one_get_other_tickets_at_once(fast_path: Path) -> None:
    with shared(fast_path / "a", 512) as rb, shared(fast_path / "b", 512) as other:
        rb.extend(items(0, 512))
        for at in range(0, 512, 2):
            rb[at] = items(at, 1)[0]
        rb.dumps(fast_path / "save")
        other.loads(fast_path / "save")
        assert (other[:] == rb[:]).all()
        assert ring_of(other).head % 512 == ring_of(rb).head % 512
        assert engine_of(other).check().ok
