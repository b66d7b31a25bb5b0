"""Programs modelled on TorchRL's tutorials, which its wheel does not contain."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, tensorclass

from tests.compat.family import said_by
from tests.compat.trace import Scenario, Step, assert_the_same

from torchrl.envs.transforms import Compose, DoubleToFloat, RenameTransform  # isort: skip

SIZE = 20


@tensorclass
class Frame:
    image: torch.Tensor
    mask: torch.Tensor


def frames(count: int) -> TensorDict:
    number = torch.arange(count)
    image = number.view(-1, 1, 1).expand(count, 4, 4).to(torch.uint8)
    return TensorDict({"a": number, "image": image, "x": number.double()}, [count])


def replay_buffers(family: Any, step: Step) -> None:
    """Makes the calls of ``rb_tutorial`` in order."""
    rb = family.ReplayBuffer(storage=family.ListStorage(SIZE), collate_fn=lambda items: items)
    step("list add", lambda: rb.add("a string"))
    step("list extend", lambda: rb.extend([30, None]))
    step("list len", lambda: len(rb))
    step("list sample", lambda: len(rb.sample(3)))

    tensors = family.LazyTensorStorage(SIZE)
    rb = family.ReplayBuffer(storage=tensors, batch_size=4)
    step("tensors add", lambda: rb.add(frames(1)[0]))
    step("tensors extend", lambda: rb.extend(frames(10)))
    step("tensors sample", lambda: rb.sample(), values=False)
    step("tensors read", lambda: rb[:])

    with tempfile.TemporaryDirectory() as folder:
        rb = family.ReplayBuffer(storage=family.LazyMemmapStorage(SIZE, scratch_dir=folder))
        step("files extend", lambda: rb.extend(frames(10)))
        step("files read", lambda: rb[:])
        step("files leaf", lambda: Path(rb._storage._storage["a"].filename).name)
        step(
            "files folder", lambda: Path(rb._storage._storage["a"].filename).parent == Path(folder)
        )
        rb = None

    rb = family.TensorDictReplayBuffer(storage=family.LazyTensorStorage(SIZE), batch_size=4)
    step("index extend", lambda: rb.extend(frames(10)))
    step("index sample", lambda: sorted({*rb.sample().keys()} - {"index_generation"}))

    rb = family.ReplayBuffer(storage=family.LazyMemmapStorage(SIZE), batch_size=4)
    images = frames(10)["image"]
    step("class extend", lambda: rb.extend(Frame(images, images > 3, batch_size=[10])))
    step("class sample", lambda: rb.sample(), values=False)
    step("class read", lambda: rb[:])

    rb = family.TensorDictReplayBuffer(
        storage=family.LazyMemmapStorage(SIZE),
        sampler=family.SamplerWithoutReplacement(drop_last=True, shuffle=False),
        batch_size=3,
    )
    rb.extend(frames(10))
    step("pass", lambda: [data["a"].tolist() for data in rb])
    step("pass again", lambda: [rb.sample()["a"].tolist() for _ in range(4)])

    rb = family.ReplayBuffer(storage=family.LazyMemmapStorage(SIZE), batch_size=3)
    rb.extend(frames(10))
    step("endless", lambda: [len(data) for _, data in zip(range(5), rb, strict=False)])

    rb = family.TensorDictReplayBuffer(
        storage=family.ListStorage(SIZE),
        sampler=family.PrioritizedSampler(max_capacity=SIZE, alpha=0.8, beta=1.1),
        priority_key="td_error",
        batch_size=50,
    )
    rb.extend(frames(10))
    rb.update_priority(torch.arange(10), torch.tensor([0.0] * 7 + [1.0] * 3))
    likely = lambda: sum(rb.sample(1000)["a"] >= 7).item() > 990  # noqa: E731
    step("priorities", likely)
    sample = rb.sample()
    sample["td_error"] = torch.zeros(50)
    step("update", lambda: rb.update_tensordict_priority(sample))
    step("shape", lambda: sample["a"].shape)

    rb = family.ReplayBuffer(
        storage=family.LazyMemmapStorage(SIZE),
        sampler=family.SamplerWithoutReplacement(shuffle=False),
        batch_size=4,
    )
    rb.append_transform(Compose(DoubleToFloat(in_keys=["x"]), RenameTransform(["image"], ["obs"])))
    rb.extend(frames(10))
    step("transformed", lambda: rb.sample())

    rb = family.TensorDictReplayBuffer(
        storage=family.LazyMemmapStorage(SIZE),
        sampler=family.SliceSampler(num_slices=4, traj_key="episode"),
        batch_size=8,
    )
    rb.extend(frames(12).set("episode", torch.tensor([1] * 3 + [2] * 2 + [3] * 7)))
    data = rb.sample()
    step("slices", lambda: data["a"].shape)
    pairs = data["a"].view(4, 2)
    step("slices in order", lambda: (pairs[:, 1] - pairs[:, 0]).tolist())
    step("slices of an episode", lambda: data["episode"].view(4, 2).diff().tolist())


def test_the_calls_of_the_tutorial_on_replay_buffers_do_the_same_on_both() -> None:
    assert_the_same(Scenario(replay_buffers))


@pytest.mark.timeout(900)
def test_dqn_with_an_lstm_has_the_same_losses_on_our_buffer_as_on_torchrls() -> None:
    losses = said_by("lstm_dqn")
    assert len(losses["torchrl"]) == 30
    assert losses["same draws"] == losses["torchrl"]
    assert len(losses["shipped"]) == 30
