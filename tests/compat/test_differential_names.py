"""Functions, trees and small methods: the same programs on both families."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.compat.trace import Scenario, Step, assert_the_same, batch, episodes

# Every step is called immediately, so the loop variables in it have the values of its round.
# ruff: noqa: B023


def trees(family: Any, step: Step) -> None:
    for name in ("SumSegmentTreeFp32", "SumSegmentTreeFp64"):
        for size in (2, 5, 16, 40):
            tree = getattr(family, name)(size)
            step(f"{name} {size} sizes", lambda: (len(tree), tree.size, tree.capacity))
            step(f"{name} {size} nothing", lambda: (tree.identity_element, tree.query(0, size)))
            numbers = torch.arange(size, dtype=tree_dtype(name)) % 7
            tree[torch.arange(size)] = numbers
            step(f"{name} {size} at", lambda: tree.at(torch.arange(size)))
            step(f"{name} {size} one", lambda: tree[size - 1])
            step(f"{name} {size} array", lambda: tree[np.arange(size)])
            tree.update(np.array([0, size - 1]), 3.0)
            ends = torch.tensor([0, size // 2]), torch.tensor([size, size])
            step(f"{name} {size} query", lambda: tree.query(*ends))
            total = tree.query(0, size)
            for value in (0.0, 2.5, total / 2, total, total + 1):
                step(f"{name} {size} scan {value}", lambda: tree.scan_lower_bound(value))
            sums = torch.tensor([0.5, total], dtype=tree_dtype(name))
            step(f"{name} {size} scan tensor", lambda: tree.scan_lower_bound(sums))
    for name in ("MinSegmentTreeFp32", "MinSegmentTreeFp64"):
        for size in (2, 5, 40):
            tree = getattr(family, name)(size)
            step(f"{name} {size} nothing", lambda: (tree.identity_element, tree.query(0, size)))
            tree[torch.arange(size)] = 3 - torch.arange(size, dtype=tree_dtype(name)) % 5
            step(f"{name} {size} at", lambda: tree[torch.arange(size)])
            step(f"{name} {size} query", lambda: tree.query(0, size))
            step(f"{name} {size} part", lambda: tree.query(size // 3, size // 2 + 1))


def tree_dtype(name: str) -> torch.dtype:
    return torch.float32 if name.endswith("32") else torch.float64


def boundaries(family: Any, step: Step) -> None:
    torch.manual_seed(1)
    for shape in ((1,), (9,), (9, 2), (6, 2, 3)):
        for density in (0.0, 0.3, 1.0):
            end = torch.rand(shape) < density
            ids = torch.randint(3, shape)
            for full in (False, True):
                for cursor in (None, 0, torch.tensor([2, 0]), range(1)):
                    name = f"{shape} {density} {full} {cursor}"
                    step(
                        f"end {name}",
                        lambda: family.find_start_stop_traj(
                            end=end, at_capacity=full, cursor=cursor
                        ),
                    )
                    step(
                        f"ids {name}",
                        lambda: family.find_start_stop_traj(
                            trajectory=ids, at_capacity=full, cursor=cursor
                        ),
                    )
    step("neither", lambda: family.find_start_stop_traj(at_capacity=True))
    step("no rows", lambda: family.find_start_stop_traj(end=torch.zeros(0), at_capacity=True))


def functions(family: Any, step: Step) -> None:
    step("leaves", lambda: list(family.tree_iter({"a": [1, (2, 3)], "b": 4})))
    step("coordinates", lambda: family.unravel_index(torch.arange(12).view(2, 6), (2, 3, 2)))

    class Reader:
        _pin_memory = False

        @family.pin_memory_output
        def read(self, value: Any) -> Any:
            return value, 1

    step("not pinned", lambda: Reader().read(torch.arange(3)))


def services(family: Any, step: Step) -> None:
    rb = family.TensorDictReplayBuffer(storage=family.LazyTensorStorage(8), batch_size=4)
    step("start", lambda: rb.start() is rb)
    step("client", lambda: rb.client() is rb)
    step("alive", lambda: rb.is_alive)
    step("backend", lambda: rb.service_backend)
    rb.extend(batch(0, 8))
    step("synchronize", lambda: rb.synchronize())
    step("shutdown", lambda: [rb.shutdown(), rb.shutdown(timeout=1)])
    step("shut", lambda: rb.is_alive)
    step("start again", lambda: rb.start())
    step("sample", lambda: rb.sample())


def ready(family: Any, step: Step) -> None:
    samplers = {
        "random": lambda: family.RandomSampler(),
        "pass": lambda: family.SamplerWithoutReplacement(),
        "whole": lambda: family.SamplerWithoutReplacement(drop_last=True),
        "priority": lambda: family.PrioritizedSampler(10, alpha=1, beta=1),
        "slices": lambda: family.SliceSampler(slice_len=2, traj_key="episode"),
        "short": lambda: family.SliceSampler(slice_len=2, traj_key="episode", strict_length=False),
    }
    for name, sampler in samplers.items():
        storage = family.LazyTensorStorage(10)
        rb = family.TensorDictReplayBuffer(storage=storage, sampler=sampler(), batch_size=4)
        step(f"{name} empty", lambda: rb.can_sample())
        for count in (1, 1, 3):
            rb.extend(episodes(count, first=len(rb)))
            step(f"{name} {len(rb)}", lambda: rb.can_sample())
            step(f"{name} {len(rb)} of two", lambda: rb.can_sample(2))
        step(f"{name} indivisible", lambda: rb.can_sample(3))
    step("no size", lambda: family.ReplayBuffer().can_sample())
    for how in ({"p": [0.0, 1.0]}, {"sample_from_all": True}, {"p": "sampleable"}):
        members = [
            family.TensorDictReplayBuffer(storage=family.LazyTensorStorage(9)) for _ in range(2)
        ]
        rb = family.ReplayBufferEnsemble(*members, batch_size=4, **how)
        for at in (1, 0):
            step(f"{how} before {at}", lambda: rb.can_sample())
            members[at].extend(batch(0, 3))
        step(f"{how} both", lambda: (rb.can_sample(), rb.can_sample(3)))


def tracked(family: Any, **options: Any) -> Any:
    writer = family.TensorDictRoundRobinWriter(track_generations=True)
    storage = family.LazyTensorStorage(6)
    return family.TensorDictReplayBuffer(storage=storage, writer=writer, batch_size=4, **options)


def versions(family: Any, step: Step) -> None:
    def told(result: Any) -> Any:
        rejected = result.version_rejected
        counts = result.updated_count, result.version_rejected_count, result.stale_count
        return result.updated, rejected, counts

    for newer in (False, True):
        rb = tracked(family)
        index = rb.extend(batch(0, 6, v=torch.tensor([0, 1, 2, 3, 4, 5])))
        known = rb.writer.generations_of(index)
        rb.extend(batch(9, 10, v=torch.tensor([0])))
        at = torch.tensor([0, 1, 2, 3, 4, 4, 4])
        change = {
            "index": index[at],
            "generation": known[at],
            "patch": {"obs": torch.arange(14.0).view(7, 2)},
            "version_key": "v",
            "version": torch.tensor([9, 1, 1, 4, 6, 7, 7]),
            "require_newer": newer,
        }
        step(f"{newer} compared", lambda: told(rb.update_if_present(**change)))
        step(f"{newer} items", lambda: rb[:].exclude("index"))
        change |= {"index": index[5:], "generation": known[5:], "version": 5}
        change["patch"] = {"obs": torch.zeros(1, 2)}
        step(f"{newer} one", lambda: told(rb.update_if_present(**change)))
    step("no version", lambda: rb.update_if_present(**change | {"version": None}))
    step("no key", lambda: rb.update_if_present(**change | {"version_key": None}))
    step("in the patch", lambda: rb.update_if_present(**change | {"patch": {"v": index[5:]}}))
    step("several", lambda: rb.update_if_present(**change | {"version_key": "obs", "patch": {}}))
    step("unknown", lambda: rb.update_if_present(**change | {"version_key": "w"}))
    rb = tracked(family, prefetch=2)
    index = rb.extend(batch(0, 6))
    rb.sample()
    patch = {"obs": torch.full((6, 2), -1.0)}
    submit = {"index": index, "generation": rb.writer.generations_of(index), "patch": patch}
    step("submitted", lambda: told(rb.submit_update_if_present(**submit).result()))
    step("seen", lambda: [rb.sample()["obs"].min().item() < 0 for _ in range(4)][2:])
    rb.shutdown()


def writers(family: Any, step: Step) -> None:
    for name in ("RoundRobinWriter", "TensorDictRoundRobinWriter"):
        for tracks in (False, True):
            writer = getattr(family, name)(track_generations=tracks)
            storage = family.LazyTensorStorage(6)
            rb = family.TensorDictReplayBuffer(storage=storage, writer=writer)
            step(f"{name} {tracks} tracks", lambda: rb.writer.tracks_generations)
            step(f"{name} {tracks} nothing", lambda: rb.writer.generations_of(torch.arange(3)))
            index = rb.extend(batch(0, 4))
            known = rb.writer.generations_of(index)
            step(
                f"{name} {tracks} at", lambda: rb.writer.write_at(torch.tensor([1, 3]), batch(7, 9))
            )
            step(f"{name} {tracks} moved", lambda: rb.writer.generations_of(index) > known)
            step(f"{name} {tracks} read", lambda: rb[:]["obs"])
            step(f"{name} {tracks} count", lambda: rb.write_count)
            step(f"{name} {tracks} next", lambda: rb.extend(batch(4, 5)))
    step("others", lambda: family.TensorDictMaxValueWriter().generations_of(torch.arange(2)))
    step("compilable", lambda: family.ImmutableDatasetWriter(compilable=True) is not None)
    step("shape", lambda: family.ListStorage(7).shape)
    for name in ("ListStorage", "LazyTensorStorage", "LazyStackStorage"):
        storage = getattr(family, name)(7)
        step(f"{name} conditional", lambda: storage.supports_conditional_update)
    for name in ("PrioritizedReplayBuffer", "TensorDictPrioritizedReplayBuffer"):
        rb = getattr(family, name)(alpha=0.7, beta=0.9, sampler_device="cpu")
        step(f"{name} sampler", lambda: rb.prioritized_sampler is rb.sampler)


def routed(family: Any, step: Step) -> None:
    for how in ({"routing_key": "to"}, {"routing_dim": 1}):
        rb = family.ReplayBufferEnsemble(tracked(family), tracked(family), batch_size=4, **how)
        for turn in range(3):
            to = torch.tensor([[0, 1], [1, 1], [0, 1]])
            data = batch(0, 6).reshape(3, 2).set("to", to)
            found = rb.extend(data)
            step(f"{how} {turn} where", lambda: (found["buffer_ids"], found["index"]))
            step(f"{how} {turn} form", lambda: (sorted(found.keys()), list(found.batch_size)))
            step(f"{how} {turn} said", lambda: rb.writer.tracks_generations)
            generation = found["index_generation"]
            step(f"{how} {turn} same", lambda: rb.writer.generations_of(found) == generation)
            change = {"index": found, "generation": generation}
            patch = {"obs": torch.zeros(6, 2)}
            step(
                f"{how} {turn} changed", lambda: rb.update_if_present(**change, patch=patch).updated
            )
            step(f"{how} {turn} stats", lambda: rb.stats())
        step(f"{how} items", lambda: [rb[at][:]["obs"] for at in range(2)])


def streams(family: Any, step: Step) -> None:
    members = []
    for lengths in ((3,), (2, 2), (5, 3)):
        rb = tracked(family, sampler=family.SliceSampler(slice_len=2, end_key=("next", "done")))
        data = episodes(*lengths)
        if len(lengths) == 1:
            data["next", "done"][:] = False
            data["next", "terminated"][:] = False
        rb.extend(data)
        members.append(rb)
    ensemble = family.ReplayBufferEnsemble(*members)
    step("ended", lambda: ensemble.end_streams())
    for at, rb in enumerate(members):
        step(f"flags {at}", lambda: rb[:]["next"])
        step(f"count {at}", lambda: rb.write_count)
    step("no entry", lambda: ensemble.end_streams(end_key=("next", "truncated")))


SCENARIOS = [
    Scenario(trees),
    Scenario(boundaries),
    Scenario(functions),
    Scenario(services),
    Scenario(ready),
    Scenario(versions),
    Scenario(writers),
    Scenario(routed),
    Scenario(streams),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_both_families_do_the_same(scenario: Scenario) -> None:
    assert_the_same(scenario)
