"""Writers and updaters of versions. Each is a process that runs until it is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from shmbuffer import LazyMemmapStorage, TensorDictReplayBuffer

WIDTH = 512


def items(version: torch.Tensor, life: int) -> TensorDict:
    """Makes items whose entries all follow from their version and their life."""
    payload = (version * 1000 + life)[:, None].expand(-1, WIDTH).clone()
    return TensorDict({"version": version, "latent": payload}, [len(version)])


def opened(path: Path, capacity: int) -> TensorDictReplayBuffer:
    storage = LazyMemmapStorage(capacity, scratch_dir=path, shared_init=True)
    return TensorDictReplayBuffer(storage=storage, batch_size=4)


def changing(path: Path, capacity: int, source: int, connection: Any) -> None:
    """Updates items to versions of its own choice as fast as it can; only newer versions apply."""
    torch.set_num_threads(1)
    rb, generator, began = opened(path, capacity), torch.Generator().manual_seed(source), False
    while not connection.poll():
        sample = rb.sample()
        version = sample["version"] + torch.randint(-3, 4, (4,), generator=generator)
        life = sample["latent"][:, 0] - sample["version"] * 1000
        result = rb.update_if_present(
            index=sample["index"],
            generation=sample["index_generation"],
            patch={"latent": (version * 1000 + life)[:, None].expand(-1, WIDTH)},
            version_key="version",
            version=version,
            require_newer=True,
        )
        assert result.version_rejected is not None
        newer = version > sample["version"]
        assert not result.updated[~newer].any()
        assert not result.version_rejected[newer & ~named_twice(sample["index"])].any()
        if not began:
            began = True
            connection.send("began")
    rb.close()


def named_twice(index: torch.Tensor) -> torch.Tensor:
    return (index[:, None] == index).sum(1) > 1


def writing(path: Path, capacity: int, source: int, connection: Any) -> None:
    """Replaces items with new ones, which begin with version 0."""
    torch.set_num_threads(1)
    rb, life = opened(path, capacity), 0
    while not connection.poll():
        life = (life + 1) % 1000
        rb.extend(items(torch.zeros(1, dtype=torch.int64), life))
        if life == 1:
            connection.send("began")
    rb.close()
