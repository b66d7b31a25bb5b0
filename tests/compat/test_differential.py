"""Programs that run on TorchRL and on shmbuffer, with the same results at each step.

Intended differences are listed beside the program and described in docs/torchrl.md.
"""

# Every step is called immediately, so the loop variables in it have the values of its round.
# ruff: noqa: B023

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass

from tests.compat import test_consuming
from tests.compat.trace import (
    DEVIATIONS,
    DOCUMENT,
    Scenario,
    Step,
    assert_the_same,
    batch,
)

from torchrl.envs.transforms import Compose, RenameTransform  # isort: skip

LISTS = ("ListStorage", "LazyStackStorage", "CompressedListStorage")
RINGS = ("LazyTensorStorage", "LazyMemmapStorage")


@tensorclass
class Item:
    id: torch.Tensor


def ranked(*ranks: float) -> TensorDict:
    return TensorDict({"rank": torch.tensor(ranks), "id": torch.arange(len(ranks))}, [len(ranks)])


# -- storages -------------------------------------------------------------------------------------


def storages_by_themselves(family: Any, step: Step) -> None:
    for name in (*LISTS, *RINGS):
        storage = getattr(family, name)(6)
        data = batch(0, 3)
        step(f"{name} set", lambda: storage.set(range(3), list(data) if name in LISTS else data))
        step(f"{name} len", lambda: len(storage))
        for index in (1, -1, [0, 2], slice(0, 2), range(2)):
            step(f"{name} get {index}", lambda index=index: storage.get(index))
        step(f"{name} get tensor", lambda: storage.get(torch.tensor([0, 2])))
        step(f"{name} get array", lambda: storage.get(np.array([0, 2])))
        step(f"{name} set one", lambda: storage.set(3, batch(3, 4)[0]))
        step(f"{name} set item", lambda: storage.__setitem__(0, batch(9, 10)[0]))
        step(f"{name} read", lambda: storage.get(slice(0, 4)))
        step(f"{name} contains", lambda: [bool(storage.contains(at)) for at in (0, 3, 5)])
        step(f"{name} ndim", lambda: storage.ndim)
        step(f"{name} max_size", lambda: storage.max_size)


def forms_of_data(family: Any, step: Step) -> None:
    number = torch.arange(3)
    forms: dict[str, Any] = {
        "tensor": number,
        "tensordict": batch(0, 3),
        "tensorclass": Item(id=number, batch_size=[3]),
        "tuple": (number, number + 1),
        "nested": {"a": number, "b": (number, {"c": [number]})},
        "list of tensordicts": list(batch(0, 3)),
        "list of batches": [batch(0, 3), batch(3, 6)],
        "list of trees": [(torch.tensor(at), {"x": torch.tensor([at])}) for at in range(3)],
        "ragged list": [torch.zeros(1), torch.zeros(2)],
        "lazy stack": torch.stack(list(batch(0, 3))),
    }
    for name in RINGS:
        for form, data in forms.items():
            rb = family.ReplayBuffer(storage=getattr(family, name)(5), batch_size=2)
            step(f"{name} {form} extend", lambda: rb.extend(data))
            step(f"{name} {form} len", lambda: len(rb))
            step(f"{name} {form} sample", lambda: rb.sample(), values=False)
            if form != "ragged list":
                step(f"{name} {form} read", lambda: rb[:])
                step(f"{name} {form} one", lambda: rb[0])


def lists_of_anything(family: Any, step: Step) -> None:
    for form, data in {
        "text": ["a", "b", "c"],
        "numbers": [1, 2.5, None],
        "range": range(3),
        "set": {7},
        "objects": [{"a": 1}, len, (1, 2)],
    }.items():
        rb = family.ReplayBuffer(storage=family.ListStorage(5), collate_fn=list, batch_size=4)
        step(f"{form} extend", lambda: rb.extend(data))
        step(f"{form} read", lambda: rb[:])
        step(f"{form} one", lambda: rb[0])
        step(f"{form} add", lambda: rb.add(data))
        step(f"{form} len", lambda: len(rb))


# -- buffers --------------------------------------------------------------------------------------


def defaults(family: Any, step: Step) -> None:
    made = {
        "ReplayBuffer": lambda: family.ReplayBuffer(),
        "TensorDictReplayBuffer": lambda: family.TensorDictReplayBuffer(),
        "PrioritizedReplayBuffer": lambda: family.PrioritizedReplayBuffer(alpha=0.7, beta=0.9),
        "TensorDictPrioritizedReplayBuffer": lambda: family.TensorDictPrioritizedReplayBuffer(
            alpha=0.7, beta=0.9
        ),
    }
    for name, make in made.items():
        rb = make()
        step(f"{name} storage", lambda: (type(rb.storage).__name__, rb.storage.max_size))
        step(f"{name} sampler", lambda: type(rb.sampler).__name__)
        step(f"{name} writer", lambda: type(rb.writer).__name__)
        step(f"{name} batch size", lambda: rb.batch_size)
        step(f"{name} dim_extend", lambda: rb.dim_extend)
    sampler = family.SliceSampler(num_slices=2)
    for name in ("end_key", "traj_key", "truncated_key", "strict_length", "cache_values"):
        step(f"SliceSampler {name}", lambda name=name: getattr(sampler, name))


def wrong_arguments(family: Any, step: Step) -> None:
    storage = family.ListStorage
    calls = {
        "an argument that is not there": lambda: family.ReplayBuffer(nothing=1),
        "prefetch without a batch size": lambda: family.ReplayBuffer(
            storage=storage(3), prefetch=2
        ),
        "drop_last without a batch size": lambda: family.ReplayBuffer(
            storage=storage(3), sampler=family.SamplerWithoutReplacement(drop_last=True)
        ),
        "transform and factory": lambda: family.ReplayBuffer(
            transform=lambda x: x, transform_factory=lambda: None
        ),
        "no alpha": lambda: family.PrioritizedReplayBuffer(),
        "negative alpha": lambda: family.PrioritizedSampler(5, -1.0, 1.0),
        "negative beta": lambda: family.PrioritizedSampler(5, 1.0, -1.0),
        "no size": lambda: family.LazyTensorStorage(),
        "text as size": lambda: family.LazyTensorStorage("a"),
        "no slices": lambda: family.SliceSampler(),
        "both kinds of slices": lambda: family.SliceSampler(num_slices=1, slice_len=1),
        "negative dim_extend": lambda: family.ReplayBuffer(
            storage=family.LazyTensorStorage(4, ndim=2), dim_extend=-1
        ),
        "a size that is not the data's": lambda: family.TensorStorage(torch.zeros(5), max_size=4),
        "a storage of another type": lambda: family.ReplayBuffer(storage=3, batch_size=2).add(1),
        "schedule of nothing": lambda: family.LinearScheduler(
            family.PrioritizedReplayBuffer(alpha=1.0, beta=1.0), "gamma", 1.0, 3
        ),
    }
    for label, call in calls.items():
        step(label, call)


def in_place(family: Any, step: Step) -> None:
    for cls in ("ReplayBuffer", "TensorDictReplayBuffer"):
        rb = getattr(family, cls)(
            storage=family.LazyTensorStorage(6), writer=family.RoundRobinWriter(), batch_size=3
        )
        rb.extend(batch(0, 4))
        for label, call in {
            "set_at_": lambda: rb.set_at_("id", torch.tensor([50]), [1]) and None,
            "set_": lambda: rb.set_("id", torch.arange(4) + 7) and None,
            "update_": lambda: rb.update_(batch(20, 24)) and None,
            "update_ of a part": lambda: rb.update_(batch(30, 34).select("id")) and None,
            "slice": lambda: rb.__setitem__(slice(1, 3), batch(60, 62)),
            "list": lambda: rb.__setitem__([0, 3], batch(70, 72)),
            "one": lambda: rb.__setitem__(2, batch(80, 81)[0]),
            "write_all": lambda: rb.write_all(batch(90, 92), end=2),
        }.items():
            step(f"{cls} {label}", call)
            step(f"{cls} {label} read", lambda: rb[:].exclude("index"))
        for index in ((0,), (slice(0, 2),), [True, False, True, False], [], slice(-1, None), ...):
            step(f"{cls} rb[{index}]", lambda index=index: rb[index].exclude("index"))
        step(f"{cls} rb[2d]", lambda: rb[torch.tensor([[0, 1], [2, 3]])].exclude("index"))
        step(f"{cls} rb[1.5]", lambda: rb[1.5])
        step(f"{cls} rb['id']", lambda: rb["id"])
        step(f"{cls} no such key", lambda: rb["nothing"])
        step(f"{cls} a key", lambda: rb.__setitem__("id", torch.zeros(4, dtype=torch.int64)))
        step(f"{cls} a key read", lambda: rb["id"])


def exchanging(family: Any, step: Step) -> None:
    rb = family.ReplayBuffer(storage=family.LazyTensorStorage(6), batch_size=3)
    rb.extend(torch.arange(4))
    for label, call in {
        "storage": lambda: type(rb.set_storage(family.LazyTensorStorage(6))).__name__,
        "sampler": lambda: type(rb.set_sampler(family.RandomSampler())).__name__,
        "writer": lambda: type(rb.set_writer(family.RoundRobinWriter())).__name__,
        "append": lambda: rb.append_transform(lambda x: x) is rb,
        "share": lambda: rb.share(False) is rb,
        "empty": lambda: rb.empty(),
        "after": lambda: rb.extend(torch.arange(3)),
    }.items():
        step(label, call)


def samples_with_info(family: Any, step: Step) -> None:
    rb = family.TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.9, storage=family.LazyTensorStorage(6), batch_size=3
    )
    rb.extend(batch(0, 4))
    step("sample", lambda: rb.sample(), values=False)
    step("info", lambda: rb.sample(return_info=True), values=False)
    step("by position", lambda: rb.sample(2, True), values=False)
    step("none", lambda: rb.sample(0), values=False)
    step("less than none", lambda: rb.sample(-1), values=False)
    step("update", lambda: rb.update_tensordict_priority(rb.sample()))
    step("mark", lambda: rb.mark_update(torch.tensor([0, 1])))
    step("default", lambda: float(rb.sampler.default_priority))
    step("wrong update", lambda: rb.update_priority(torch.tensor([0, 1]), torch.ones(3)))
    # The index is beyond the six slots but within the eight leaves of TorchRL's tree, which checks
    # nothing. A larger index would be written to foreign memory.
    step("out of range", lambda: rb.update_priority(torch.tensor([6]), 1.0))
    step("negative", lambda: rb.update_priority(0, -1.0))
    step("no batch size", lambda: family.ReplayBuffer(storage=family.ListStorage(3)).sample())
    rb.empty()
    step("empty", lambda: rb.sample())


# -- samplers -------------------------------------------------------------------------------------


def without_replacement(family: Any, step: Step) -> None:
    def made(items: int = 10, batch_size: int = 3, prefetch: int | None = None, **how: Any) -> Any:
        rb = family.TensorDictReplayBuffer(
            storage=family.LazyTensorStorage(10),
            sampler=family.SamplerWithoutReplacement(shuffle=False, **how),
            batch_size=batch_size,
            prefetch=prefetch,
        )
        rb.extend(batch(0, items))
        return rb

    def ids(one: Any) -> Any:
        return None if one is None else one["id"].tolist()

    rb = made()
    step("samples", lambda: [ids(rb.sample()) for _ in range(9)])
    step("ran out", lambda: [(len(rb.sample()), rb.sampler.ran_out) for _ in range(9)])
    rb = made(drop_last=True)
    step("drop last", lambda: [ids(rb.sample()) for _ in range(9)])
    step("drop last ran out", lambda: [(len(rb.sample()), rb.sampler.ran_out) for _ in range(9)])
    rb = made()
    step("sizes", lambda: [ids(rb.sample(size)) for size in (3, 4, 2, 5, 10, 20, 1)])
    rb = made(4)
    step("growing", lambda: [ids(rb.sample()), rb.extend(batch(4, 6)).tolist(), ids(rb.sample())])
    step("grown", lambda: [ids(rb.sample()) for _ in range(4)])
    rb = made(4)
    step("emptied", lambda: [ids(rb.sample()), rb.empty(), rb.extend(batch(4, 8)).tolist()])
    step("after", lambda: [ids(rb.sample()) for _ in range(3)])
    rb = made()
    step("two loops", lambda: [[ids(one) for one in rb], [ids(one) for one in rb]])
    rb = made()
    step("broken off", lambda: ids(next(iter(rb))))
    step("the rest", lambda: [ids(one) for one in rb])
    rb = made()
    step("sampled first", lambda: [ids(rb.sample())] + [ids(one) for one in rb])
    rb = made(2)
    step("fewer than a batch", lambda: [ids(one) for one in rb])
    rb = made()
    step("next", lambda: [ids(rb.next()) for _ in range(9)])
    rb = made(prefetch=1)
    step("prefetch 1", lambda: [[ids(one) for one in rb], [ids(one) for one in rb]])
    # Two threads of TorchRL draw in either order.
    rb = made(prefetch=2)
    step("prefetch 2", lambda: [sorted(ids(one) for one in rb) for _ in range(2)])
    rb = made(prefetch=2, drop_last=True)
    step("prefetch, drop last", lambda: [sorted(ids(one) for one in rb) for _ in range(2)])


def priorities(family: Any, step: Step) -> None:
    def weights(rb: Any) -> list[tuple[int, float]]:
        sample = rb.sample(200)
        pairs = zip(sample["id"].tolist(), sample["priority_weight"].tolist(), strict=True)
        return sorted({(number, round(weight, 4)) for number, weight in pairs})

    for name in ("ListStorage", *RINGS):
        rb = family.TensorDictPrioritizedReplayBuffer(
            alpha=0.7, beta=0.9, storage=getattr(family, name)(5)
        )
        rb.extend(batch(0, 3, td_error=torch.tensor([1.0, 2.0, 3.0])))
        step(f"{name} from the data", lambda: weights(rb))
        rb.update_priority(torch.tensor([0, 1]), torch.tensor([5.0, 0.5]))
        step(f"{name} updated", lambda: weights(rb))
        rb.add(batch(3, 4, td_error=torch.tensor([2.0]))[0])
        step(f"{name} added", lambda: weights(rb))
        rb.extend(batch(4, 7, td_error=torch.tensor([1.0, 4.0, 2.0])))
        step(f"{name} over", lambda: weights(rb))
        step(f"{name} default", lambda: float(rb.sampler.default_priority))
        rb.sampler.beta = 0.4
        step(f"{name} beta", lambda: weights(rb))
        rb.update_priority(torch.tensor([0, -1]), torch.tensor([3.0, 100.0]))
        step(f"{name} left out", lambda: weights(rb))


def schedules(family: Any, step: Step) -> None:
    rb = family.PrioritizedReplayBuffer(alpha=0.8, beta=0.4, storage=family.LazyTensorStorage(5))
    rb.extend(torch.arange(5))
    both = family.SchedulerList(
        [
            family.LinearScheduler(rb, "beta", final_value=1.0, num_steps=3),
            family.StepScheduler(rb, "alpha", gamma=0.5, n_steps=2, min_value=0.15),
        ]
    )
    for number in range(6):
        both.step()
        step(
            f"step {number}",
            lambda: (round(float(rb.sampler.alpha), 6), round(float(rb.sampler.beta), 6)),
        )


# -- writers --------------------------------------------------------------------------------------


def top_k(family: Any, step: Step) -> None:
    for name in ("ListStorage", *RINGS):

        def made(size: int = 4, **how: Any) -> Any:
            return family.TensorDictReplayBuffer(
                storage=getattr(family, name)(size),
                writer=family.TensorDictMaxValueWriter(**{"rank_key": "rank", **how}),
                batch_size=3,
            )

        rb = made()
        step(f"{name} first", lambda: rb.extend(ranked(1, 2, 3)))
        step(f"{name} evicts", lambda: rb.extend(ranked(5, 0, 4)))
        step(f"{name} better", lambda: rb.add(ranked(9)[0]))
        step(f"{name} worse", lambda: rb.add(ranked(0)[0]))
        step(f"{name} equal", lambda: rb.add(ranked(3)[0]))
        step(f"{name} ranks", lambda: rb[:]["rank"])
        step(f"{name} count", lambda: (rb.write_count, len(rb)))
        step(f"{name} many", lambda: rb.extend(ranked(1, 1, 10, 11, 12, 13, 14)))
        step(f"{name} many ranks", lambda: rb[:]["rank"])
        step(f"{name} none", lambda: rb.extend(ranked(0, 0)))
        step(f"{name} place", lambda: rb.writer.get_insert_index(ranked(100)[0]))
        step(f"{name} no place", lambda: rb.writer.get_insert_index(ranked(0)[0]))
        rb.empty()
        step(f"{name} emptied", lambda: (rb.extend(ranked(1, 2)), rb.write_count))
        for how in ("max", "min", "mean", "median", "sum"):
            rb = made(2, reduction=how)
            several = torch.tensor([[1.0, 8, 3], [4, 4, 5], [2, 2, 20], [0, 0, 6]])
            step(f"{name} {how}", lambda: rb.extend(TensorDict({"rank": several}, [4])))
            step(f"{name} {how} ranks", lambda: rb[:]["rank"])
        rb = family.ReplayBuffer(
            storage=getattr(family, name)(4), writer=family.TensorDictMaxValueWriter("rank")
        )
        step(f"{name} no tensordict", lambda: rb.extend(torch.ones(2)))
        step(f"{name} no item", lambda: rb.add(torch.ones(2)))


def immutable(family: Any, step: Step) -> None:
    rb = family.ReplayBuffer(storage=family.LazyTensorStorage(5), batch_size=2)
    rb.extend(torch.arange(3))
    rb.set_writer(family.ImmutableDatasetWriter())
    step("extend", lambda: rb.extend(torch.arange(3)))
    step("add", lambda: rb.add(torch.tensor(1)))
    step("read", lambda: rb[:])


# -- ensembles ------------------------------------------------------------------------------------


def ensembles(family: Any, step: Step) -> None:
    def made(**how: Any) -> Any:
        members = [
            family.TensorDictReplayBuffer(
                storage=family.LazyTensorStorage(8),
                sampler=family.SamplerWithoutReplacement(shuffle=False),
                writer=family.RoundRobinWriter(),
            )
            for _ in range(3)
        ]
        rb = family.ReplayBufferEnsemble(*members, **{"batch_size": 6, **how})
        for number in range(3):
            rb[number].extend(batch(100 * number, 100 * number + 5))
        return rb

    rb = made(sample_from_all=True)
    step("sample", lambda: rb.sample())
    step("another", lambda: rb.sample()["id"])
    step("info", lambda: rb.sample(return_info=True)[0]["id"])
    for label, index in {
        "one buffer": (1, 3), "a row": (0, slice(None)), "a column": (slice(None), 2),
        "a block": (slice(None), slice(0, 2)), "one of some": (slice(1, None), 2),
    }.items():  # fmt: skip
        step(label, lambda index=index: rb[index].exclude("index"))
    step("a part", lambda: type(rb[:2]).__name__)
    step("a list", lambda: type(rb[[0, 2]]).__name__)
    step("one", lambda: len(rb[1]))
    step("the last", lambda: rb[-1][:]["id"])
    step("not there", lambda: rb[5])
    step("write", lambda: rb.extend(batch(0, 3)))
    step("add", lambda: rb.add(batch(0, 1)[0]))
    step("odd", lambda: made(batch_size=7, sample_from_all=True).sample())
    step("two", lambda: made(num_buffer_sampled=2).sample(), values=False)
    step("by default", lambda: made().sample(), values=False)
    rb = made(p=[1.0, 0.0, 0.0], num_buffer_sampled=2)
    step("p", lambda: rb.sample()["id"])


# -- transforms -----------------------------------------------------------------------------------


def composes(family: Any, step: Step) -> None:
    def renamed(old: str, new: str) -> Any:
        return RenameTransform([old], [new])

    rb = family.TensorDictReplayBuffer(
        storage=family.LazyTensorStorage(5),
        writer=family.RoundRobinWriter(),
        transform=Compose(renamed("obs", "one"), renamed("two", "obs")),
    )
    step("length", lambda: len(rb.transform))
    step("between", lambda: rb.insert_transform(1, renamed("one", "two")) is rb)
    step("kinds", lambda: [type(one).__name__ for one in rb.transform])
    rb.extend(batch(0, 3))
    step("read", lambda: rb[:])
    step("beyond", lambda: rb.insert_transform(10, renamed("a", "b")))
    step("before", lambda: rb.insert_transform(-10, renamed("a", "b")))


SCENARIOS = [
    Scenario(storages_by_themselves),
    Scenario(forms_of_data),
    Scenario(lists_of_anything),
    Scenario(defaults),
    Scenario(wrong_arguments),
    Scenario(
        in_place,
        {
            "ReplayBuffer a key read": "rb[key] = value",
            "TensorDictReplayBuffer a key read": "rb[key] = value",
        },
    ),
    Scenario(exchanging),
    Scenario(
        samples_with_info,
        {"out of range": "index out of range", "negative": "priorities that are none"},
    ),
    Scenario(without_replacement),
    Scenario(priorities),
    Scenario(schedules),
    Scenario(top_k),
    Scenario(immutable),
    Scenario(ensembles, {"info": "last columns of an ensemble"}),
    Scenario(composes),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_both_families_do_the_same(scenario: Scenario) -> None:
    assert_the_same(scenario)


def test_every_deviation_is_in_the_document_and_none_is_unused() -> None:
    text = " ".join(DOCUMENT.read_text().split())
    for name, words in DEVIATIONS.items():
        assert words in text, f"docs/torchrl.md does not say {words!r} ({name})"
    programs = [*SCENARIOS, *test_consuming.SCENARIOS]
    used = {name for scenario in programs for name in scenario.deviations.values()}
    assert used == set(DEVIATIONS)
