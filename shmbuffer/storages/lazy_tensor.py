"""In-memory storage that is allocated on the first write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shmbuffer.memory.system.progress import OnProgress
from shmbuffer.storages.location import Location
from shmbuffer.storages.movers.tensor_rows import Rows
from shmbuffer.storages.tensor import TensorStorage
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensor_kit import new_columns


class LazyTensorStorage(TensorStorage):
    """A storage in memory. The first write defines the items' structure and allocates the memory.

    On the CPU, the bytes are in shared anonymous memory. After the first write, the storage can be
    passed to spawned or forked processes, which share the buffer. The memory is freed when the last
    of these processes ends.

    Text and other Python objects in a TensorDict are stored beside the tensors, and samples return
    them as tensordict does. A storage with such objects cannot be passed to another process. The
    same applies to a PyTree with keys other than strings, numbers, None or tuples of these. In both
    cases, torch copies the rows instead of the C core.

    Args:
        max_size: capacity in elements.
        device: device of the items. On a GPU, torch copies the items, and the storage cannot be
            passed to another process. None or ``"auto"`` uses the device of the first batch.
        ndim: number of leading dimensions of the data that belong to the storage. With
            ``ndim > 1``, the first write rounds ``max_size`` up to a multiple of the number of
            lanes, which is the product of the dimensions after the first.
        compilable: has no effect, because `torch.compile` never compiles the native calls.
        consolidated: has no effect. TorchRL's option places all leaves in one block of memory, as
            this storage always does on the CPU.
        shared_init: if True, the storage is in a temporary directory, like a `LazyMemmapStorage`.
            It can be passed to other processes before the first write. The first write by any
            process defines the structure of the items.
        cleanup_memmap: if True, removes the directory of ``shared_init`` when the process that
            created it ends.
        prefault: see `LazyMemmapStorage`. Allocates CPU memory in advance, instead of when it is
            first written.
        on_progress: see `LazyMemmapStorage`.

    Raises:
        ValueError: ``max_size`` or ``ndim`` is below 1, ``prefault`` is unknown, or ``shared_init``
            was passed with the device of a GPU.

    With ``shared_init``, the first write raises TypeError if it contains text, other Python objects
    or a key that only one process can use.

    Cost: memory is allocated when it is first written.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import LazyTensorStorage
        >>> storage = LazyTensorStorage(10)
        >>> storage.set(range(3), TensorDict({"a": torch.arange(3)}, [3]))
        >>> len(storage), storage.get(slice(None))["a"].tolist()
        (3, [0, 1, 2])

    Source: ``torchrl.data.LazyTensorStorage``.
    """

    _is_lazy = True

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str | None = "cpu",
        ndim: int = 1,
        compilable: bool = False,
        consolidated: bool = False,
        shared_init: bool = False,
        cleanup_memmap: bool = True,
        prefault: str = "off",
        on_progress: OnProgress | None = None,
    ) -> None:
        self.consolidated = bool(consolidated)
        if self._location is None:  # a derived class may have set the location
            on_cpu = device is None or device == "auto" or torch.device(device).type == "cpu"
            if shared_init and not on_cpu:
                raise ValueError(
                    f"LazyTensorStorage(shared_init=True, device={device!r}): other processes "
                    "cannot access the GPU memory of this process; use device='cpu' and move the "
                    "samples to the GPU"
                )
            self._location = Location(
                shared_init=shared_init,
                auto_cleanup=cleanup_memmap,
                prefault=prefault,
                on_progress=on_progress,
            )
        super().__init__(None, max_size, device=device, ndim=ndim, compilable=compilable)

    @property
    def scratch_dir(self) -> Path | None:
        """The directory of the storage, or None until it is created.

        Raises:
            AttributeError: the storage is in memory. Programs check ``hasattr(storage,
                "scratch_dir")`` before they remove the directory, because TorchRL's in-memory
                storages do not have this attribute.
        """
        if not (self.shared or self._memory_mapped):
            raise AttributeError(
                f"{type(self).__name__} has no scratch_dir, because its items are in memory; use a "
                "LazyMemmapStorage, or pass shared_init=True"
            )
        return self._directory

    def _define(self, data: Any, single: bool) -> Rows:
        if self.device is None:
            self.device = _device_of(data)
        device = cpu.DEVICE if self._memory_mapped else self.device
        leaves = self._describe(data, single)
        for_all = self.shared or self._handed_over
        if device.type == "cpu" and (for_all or leaves.node.private() is None):
            return self._create_native_rows(leaves)
        slots = self._slots(leaves)
        return self._create_held_rows(leaves, slots, new_columns(leaves, slots, device))


def _device_of(data: Any) -> torch.device:
    while not isinstance(data, torch.Tensor):
        if getattr(data, "device", None) is not None:
            return torch.device(data.device)
        values = list(data.values()) if hasattr(data, "values") else data
        if not isinstance(values, (list, tuple)) or not values:
            return cpu.DEVICE
        data = values[0]
    return data.device
