"""Storage for items of different shapes. Several items are returned as a lazy stack."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from tensordict import LazyStackedTensorDict

from shmbuffer.storages.indexing import is_int
from shmbuffer.storages.record_list import RecordList, RecordOptions
from shmbuffer.tensors.form.tensor_batches import collate, lazy_stack_of
from shmbuffer.tensors.records.tensor_decoder import RawBatch


class LazyStackStorage(RecordList):
    """A list of TensorDicts or tensorclasses of any shapes and keys, including text and objects.

    Several items are returned as one lazy stack without being copied. In its shapes, a size that
    differs between items is -1. Text is returned as a NonTensorStack, and ``densify()`` converts
    the stack to nested tensors. Setting an entry of the stack does not change the items. Items of
    other kinds, such as the dicts that a `ReplayBuffer` writes, are returned as a list. The buffer
    stacks each entry of the list, or calls its ``collate_fn`` if the items differ.

    Without ``scratch_dir`` and ``shared_init``, the items are in a list of this process. They can
    contain any Python objects, are not copied, and need no limit. Passing the storage to another
    process raises RuntimeError.

    With one of these arguments, the items are *records* in a ring of bytes. Any number of processes
    can write and read this ring, and it is kept when they end; see `RecordList`.

    Args:
        max_size: capacity in items. None means no limit, and is only possible in one process.
        compilable: has no effect, because `torch.compile` never compiles the native calls.
        stack_dim: position of the stack dimension in the batch dimensions of a sample. A negative
            number counts from the end.
        device: device to which items are moved when they are written. None does not move them.
            The tensors of records are moved to this device when they are read, and None means the
            CPU.
        max_bytes: capacity in bytes of records, including headers. Required with a directory. The
            oldest items are removed when either capacity is reached.
        pad_output: form of a batch. None returns a lazy stack. A number is the value with which
            shorter leaves are padded to dense tensors. The entry ``"mask"`` is then True for the
            elements of the items and False for the padding.
            ``"nested"`` returns nested tensors. A dict contains the arguments of `pad`
            (``{"value": 0, "mask_key": {"tokens": "mask"}}``) or of `densify`
            (``{"keys": ["tokens"]}``).
        **options: ``scratch_dir``, ``shared_init``, ``existsok``, ``auto_cleanup``, ``checksum``,
            ``reserve`` (``"all"`` or False), ``timeout``, ``prefault``, ``on_progress``; see
            `LazyMemmapStorage`.

    Raises:
        ValueError: a directory was requested without ``max_size`` or ``max_bytes``, or
            ``max_bytes`` was passed without a directory.
        TypeError: ``pad_output`` has an invalid type.
        SchemaMismatchError, ...: see `LazyMemmapStorage`.

    Cost: one shallow copy per item in one process, and a copy of the bytes of records. The tensors
        of an entry are stacked when the entry is read.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import LazyStackStorage
        >>> storage = LazyStackStorage(10)
        >>> storage.set(0, TensorDict(a=torch.zeros(3), text="three"))
        >>> storage.set(1, TensorDict(a=torch.zeros(4), text="four"))
        >>> batch = storage.get([1, 0])
        >>> list(batch["text"]), batch.get_item_shape("a")
        (['four', 'three'], torch.Size([2, -1]))

    Source: ``torchrl.data.LazyStackStorage``.
    """

    family = "LazyStackStorage"

    def __init__(
        self,
        max_size: int | None = None,
        *,
        stack_dim: int = 0,
        device: torch.device | str | int | None = None,
        **options: Unpack[RecordOptions],
    ) -> None:
        self.stack_dim = int(stack_dim)
        super().__init__(max_size, device=device, **options)

    def put(self, cursor: Any, data: Any, *, in_place: bool) -> None:
        """Writes items to ``cursor``. A stack from `get` is split along its stack dimension."""
        if isinstance(data, LazyStackedTensorDict) and not is_int(cursor):
            dim = self.stack_dim + (data.batch_dims if self.stack_dim < 0 else 0)
            data = list(data.tensordicts) if dim == data.stack_dim else data
        super().put(cursor, data, in_place=in_place)

    def uncollated(self, data: Any) -> Any:
        """Returns several items as a lazy stack, or as a list if they cannot be stacked."""
        if isinstance(data, RawBatch):
            return data.stacked(self.stack_dim)
        if type(data) is not list:
            return data
        stack = lazy_stack_of(data, self.stack_dim)
        return data if stack is None else stack

    def _collate(self, data: Any) -> Any:
        found = self.uncollated(data)
        return collate(found) if type(found) is list else found

    def _recorded_arguments(self) -> dict[str, Any]:
        return {"stack_dim": self.stack_dim}

    @classmethod
    def _arguments_from(cls, recorded: dict[str, Any]) -> dict[str, Any]:
        return {"stack_dim": recorded.get("stack_dim", 0)}
