"""Weights that a learner publishes for its collectors, next to the buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shmbuffer.buffers.data_path.parts import Parts, ring_backed
from shmbuffer.items.arrays import NO_ARRAY, is_array
from shmbuffer.memory import Leaf, weights
from shmbuffer.memory.directory.seat import Seat
from shmbuffer.memory.weights import TIMEOUT_S, Weights
from shmbuffer.tensors.eager import eager
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensors import as_tensor, contiguous, dtype_name, torch_dtype


class Publishing(Parts):
    """Publishes weights."""

    @eager
    def publish(
        self, state_dict: Mapping[str, Any], step: int, *, timeout: float = TIMEOUT_S
    ) -> int:
        """Make these weights the newest, for all processes that have the buffer.

        They appear as a whole or not at all, even if this process is killed, and stay in the
        directory until the next publish. Publisher and readers never wait for each other.

        Args:
            state_dict: tensors by name, as of ``Module.state_dict()``; nested mappings (a
                TensorDict) stay nested. Those on a GPU are copied. No other thread may change them
                meanwhile.
            step: the learner's step, returned by `newest`; any number.
            timeout: seconds to wait for another process that is publishing.

        Returns:
            The version: 1, 2, ..., growing across restarts. The consumer's version, for a
            `StalenessAwareSampler`, becomes this one if it was smaller.

        Raises:
            SchemaMismatchError: other names, dtypes or shapes than in the first publish; the error
                names the first difference, and nothing was changed.
            AttachTimeout: another process has stopped in the middle of publishing; ``pids``.
            SpaceError: no room for two copies, in the first publish.
            TypeError: a value is no tensor, or the storage is not one of this package.
            ShmBufferError: the buffer has no directory.

        Cost: 0.1 ms, and a copy and a checksum of the tensors.
        """
        tensors = {path: _bytes(path, value) for path, value in weights.flat(state_dict).items()}
        leaves = [
            Leaf(path, dtype_name(one.dtype), tuple(one.shape)) for path, one in tensors.items()
        ]
        addresses = [one.data_ptr() for one in tensors.values()]
        return weights.publish(self._seat(), leaves, addresses, step, timeout)

    @eager
    def newest(self, than: int | None = None) -> Weights | None:
        """The newest published weights, if they are newer than version ``than``.

        Returns:
            `Weights`: ``version``, ``step`` and ``state_dict`` with tensors of the caller's own,
            for ``Module.load_state_dict``; None if there is no newer version.

        Raises:
            CorruptBufferError: another program has overwritten the weights, or their file.
            BufferUnlinkedError: the directory was removed; noticed within a second.
            TypeError, ShmBufferError: as `publish`.

        Cost: a microsecond if there is no newer version (ten before the first write to the
            buffer), else a copy and a checksum.
        """
        found = weights.newest(self._seat(), than)
        if found is None:
            return None
        leaves = found.form.leaves
        tensors = [
            torch.from_numpy(part).view(torch_dtype(leaf.dtype)).reshape(leaf.shape)
            if leaf.nbytes  # torch cannot view an empty tensor as another dtype
            else cpu.empty(leaf.shape, dtype=torch_dtype(leaf.dtype))
            for leaf, part in zip(leaves, found.parts(), strict=True)
        ]
        return Weights(found.version, found.step, weights.nested(leaves, tensors))

    def _seat(self) -> Seat:
        """The seat in the directory of the buffer."""
        storage = ring_backed(self._storage, "publish and newest need")
        if not storage.shared:
            raise weights.nowhere(storage.where)
        return storage.engine().seat


def _bytes(path: tuple[str, ...], value: Any) -> torch.Tensor:
    """A contiguous tensor on the CPU."""
    try:
        if not is_array(value):
            raise TypeError("only tensors and arrays can be published")
        return contiguous(as_tensor(value))
    except NO_ARRAY as error:
        raise TypeError(
            f"publish: '{'.'.join(path)}' is a {type(value).__name__} that cannot be stored "
            f"({error}); leave it out, or convert it"
        ) from error
