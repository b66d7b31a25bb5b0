"""What other processes do in these tests. Each runs in a process of its own."""

from __future__ import annotations

import sys
from typing import Any

import torch

import shmbuffer
from shmbuffer import ReplayBuffer
from tests.kit.items import items


def write(buffer: ReplayBuffer, value: int, connection: Any) -> None:
    """Extend once and say where."""
    torch.set_num_threads(1)
    index = buffer.extend(items(value, value + 2))
    connection.send((index.tolist(), len(buffer)))
    buffer.close()


def write_first(buffer: ReplayBuffer, barrier: Any, value: int) -> None:
    """Race for the first write."""
    torch.set_num_threads(1)
    barrier.wait(60)
    buffer.extend(items(value, value + 2))
    buffer.close()


def set_priorities(buffer: Any, connection: Any) -> None:
    """Give all but one item no priority, as a second learner would."""
    torch.set_num_threads(1)
    sample = buffer.sample()
    sample["td_error"] = (sample["a"] == 2).float()
    connection.send(tuple(buffer.update_tensordict_priority(sample)))
    buffer.close()


def make_checkpointers_without_h5py(connection: Any) -> None:
    """Load them as where it is not installed, and tell what the one that needs it says."""
    sys.modules["h5py"] = None  # type: ignore[assignment]
    shmbuffer.H5Split(), shmbuffer.H5Combine(), shmbuffer.NestedStorageCheckpointer()
    try:
        shmbuffer.H5StorageCheckpointer()
    except ImportError as error:
        connection.send(str(error))
