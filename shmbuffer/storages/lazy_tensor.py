"""The storage in memory, made by the first write."""

from __future__ import annotations

from typing import Any

import torch

from shmbuffer.memory.system.progress import OnProgress
from shmbuffer.storages.location import Location
from shmbuffer.storages.rows import Rows
from shmbuffer.storages.tensor import TensorStorage
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.kit import new_columns


class LazyTensorStorage(TensorStorage):
    """A storage in memory. The first write says what an item is, and allocates.

    On the CPU the bytes are shared anonymous memory: once something was written, the storage can be
    passed to a process that is spawned or forked, and all of them see one buffer. It is gone with
    the last of them.

    Text and other Python objects that are entries of a TensorDict are kept beside the tensors, and
    samples give them back as tensordict does. A storage that has some belongs to its process and
    cannot be passed on; the same goes for a PyTree with keys other than text, numbers, None and
    tuples of them. torch moves the rows then, not the C core.

    Args:
        max_size: capacity in elements.
        device: where the items are. On a GPU torch moves them, and the storage cannot be passed to
            another process; None or ``"auto"`` takes the device of the first batch.
        ndim: leading dimensions of the data that belong to the storage. With ``ndim > 1``
            ``max_size`` is rounded up to whole slots (the product of the other dimensions) at the
            first write.
        compilable: accepted; `torch.compile` leaves the native calls alone either way.
        consolidated: accepted, and without effect: on the CPU all leaves lie in one piece of memory
            either way, which is what TorchRL's option is about.
        shared_init: the first write defines the storage for all: it lies in a temporary
            directory then, as a `LazyMemmapStorage` does, and can be passed on before anything was
            written.
        cleanup_memmap: with ``shared_init``, remove that directory when the process that made it
            ends.
        prefault: of the CPU's memory, see `LazyMemmapStorage`; all of it is taken then, and not as
            it is written.
        on_progress: see `LazyMemmapStorage`.

    Raises:
        ValueError: ``max_size`` or ``ndim`` below 1, or no such ``prefault``.

    With ``shared_init`` the first write raises TypeError where it brings text, objects or such
    keys.

    Cost: memory is taken when it is first written, not at once.

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
        if self._location is None:  # else a derived class has said where
            on_cpu = device is None or device == "auto" or torch.device(device).type == "cpu"
            if shared_init and not on_cpu:
                raise ValueError(
                    f"LazyTensorStorage(shared_init=True, device={device!r}): other processes "
                    "cannot see this process's GPU memory; leave device='cpu', and send samples "
                    "to the GPU"
                )
            self._location = Location(
                shared_init=shared_init,
                auto_cleanup=cleanup_memmap,
                prefault=prefault,
                on_progress=on_progress,
            )
        super().__init__(None, max_size, device=device, ndim=ndim, compilable=compilable)

    def _define(self, data: Any, single: bool) -> Rows:
        if self.device is None:
            self.device = _device_of(data)
        device = cpu.DEVICE if self._memory_mapped else self.device
        leaves = self._described(data, single)
        for_all = self.shared or self._handed_over
        if device.type == "cpu" and (for_all or leaves.node.private() is None):
            return self._native(leaves)
        slots = self._slots(leaves)
        return self._hold(leaves, slots, new_columns(leaves, slots, device))


def _device_of(data: Any) -> torch.device:
    while not isinstance(data, torch.Tensor):
        if getattr(data, "device", None) is not None:
            return torch.device(data.device)
        values = list(data.values()) if hasattr(data, "values") else data
        if not isinstance(values, (list, tuple)) or not values:
            return cpu.DEVICE
        data = values[0]
    return data.device
