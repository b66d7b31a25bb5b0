"""Buffers of each kind that can be saved, for damage to their saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack, tensorclass

from shmbuffer import (
    CompressedListStorage,
    ConsumingSampler,
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    NestedStorageCheckpointer,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    StreamingSliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from shmbuffer.saves.values import Parts
from tests.replay.episodes import stream


class Scaled(torch.nn.Module):
    """A transform with a state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, data: Any) -> Any:
        return data


@tensorclass
class Step:
    obs: torch.Tensor


def steps(first: int) -> TensorDict:
    return stream(6, seed=first)


def labelled(first: int) -> TensorDict:
    data = steps(first)
    data["text"] = NonTensorStack(*[f"{first + i}" for i in range(6)])
    return data


def nested(first: int) -> TensorDict:
    """Makes items that contain a tensorclass and a lazy stack."""
    parts = [TensorDict(a=torch.full((6, n), first), batch_size=[6]) for n in (2, 3)]
    step = Step(obs=torch.zeros(6, 2), batch_size=[6])
    return TensorDict({"step": step, "lazy": lazy_stack(parts, 1)}, [6])


def objects(first: int) -> list[Any]:
    return [
        {"x": torch.ones(first + i), "s": "t", "n": (1, 2.5, None), "z": np.arange(3)}
        for i in range(6)
    ]


def rows(**options: Any) -> Any:
    return TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4, **options)


def rows_with_everything() -> Any:
    rb = rows(
        sampler=PrioritizedSampler(8, 0.7, 0.4),
        generator=torch.Generator().manual_seed(1),
        prefetch=2,
    )
    rb.append_transform(Scaled())
    return rb


def records(**options: Any) -> Any:
    storage = LazyStackStorage(8, max_bytes=2**16, shared_init=True)
    return TensorDictReplayBuffer(storage=storage, batch_size=4, **options)


def of_objects(storage: Callable[[int], Any]) -> Any:
    return ReplayBuffer(storage=storage(8), batch_size=4, collate_fn=lambda batch: batch)


@dataclass(frozen=True)
class Kind:
    """A kind of save.

    Attributes:
        make: makes an empty buffer.
        data: makes six items with numbers from the given one.
        layout: the layout of the save.
        unread: files that a load does not need.
    """

    make: Callable[[], Any]
    data: Callable[[int], Any]
    layout: str = "shmbuffer"
    unread: set[str] = field(default_factory=set)

    def filled(self, first: int) -> Any:
        """Returns a buffer with items from which a batch was drawn."""
        rb = self.make()
        rb.extend(self.data(first))
        if not isinstance(rb.writer, TensorDictMaxValueWriter):
            rb.sample()
        return rb

    def saved(self, path: Path) -> Path:
        """Saves a buffer with items; returns the path."""
        rb = self.filled(1)
        rb.dumps(path, extra={"step": torch.ones(2)}, layout=self.layout)
        end(rb)
        return path


def content(rb: Any) -> tuple[Any, ...]:
    """Returns the items of a buffer in a form that can be compared."""
    parts = Parts(rb[:])
    return parts.form, parts.objects, [bytes(chunk) for chunk in parts.chunks]


def end(rb: Any) -> None:
    """Removes the temporary directory of a buffer, without waiting for the end of the process."""
    rb.close()
    if hasattr(rb._storage, "cleanup"):
        rb._storage.cleanup()


TREES = {"sampler/mintree.memmap"}
RANKS = {"writer/current_top_values.memmap"}
KINDS = {
    "rows, with everything": Kind(rows_with_everything, labelled),
    "rows with a consumer": Kind(lambda: rows(sampler=ConsumingSampler()), steps),
    "rows with a pass": Kind(lambda: rows(sampler=SamplerWithoutReplacement()), steps),
    "rows with windows": Kind(
        lambda: rows(
            sampler=StreamingSliceSampler(slice_len=2, traj_key=("collector", "traj_ids"))
        ),
        steps,
    ),
    "records": Kind(records, steps),
    "list": Kind(lambda: of_objects(ListStorage), objects),
    "rows for TorchRL": Kind(rows_with_everything, labelled, "torchrl", TREES),
    "nested rows for TorchRL": Kind(rows, nested, "torchrl"),
    "pytree for TorchRL": Kind(
        lambda: ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4),
        lambda first: (torch.arange(first, first + 6), {"k": torch.ones(6, 2)}),
        "torchrl",
    ),
    "ranks for TorchRL": Kind(
        lambda: rows(writer=TensorDictMaxValueWriter(rank_key="action")), steps, "torchrl", RANKS
    ),
    "records for TorchRL": Kind(lambda: records(sampler=ConsumingSampler()), steps, "torchrl"),
    "compressed for TorchRL": Kind(lambda: of_objects(CompressedListStorage), objects, "torchrl"),
    "flat episodes": Kind(lambda: rows(checkpointer=FlatStorageCheckpointer()), steps),
    "nested episodes": Kind(lambda: rows(checkpointer=NestedStorageCheckpointer()), steps),
    "episodes in HDF5": Kind(lambda: rows(checkpointer=H5StorageCheckpointer()), steps),
}
