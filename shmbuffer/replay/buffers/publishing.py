"""Weights that a learner hands to its collectors, beside the buffer: published, and looked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from shmbuffer.memory import Leaf, weights
from shmbuffer.memory.weights import TIMEOUT_S, Weights
from shmbuffer.replay.buffers.parts import Parts
from shmbuffer.replay.eager import eager
from shmbuffer.replay.form.tensors import (
    NO_TENSOR,
    as_tensor,
    contiguous,
    dtype_name,
    is_number,
    torch_dtype,
)
from shmbuffer.replay.storages.ring_backed import RingBacked

if TYPE_CHECKING:
    from shmbuffer.memory.seat import Seat


class Publishing(Parts):
    """The part of a buffer that hands weights over."""

    @eager
    def publish(
        self, state_dict: Mapping[str, Any], step: int, *, timeout: float = TIMEOUT_S
    ) -> int:
        """Make these weights the newest, for every process that has the buffer.

        They are there as a whole or not at all, also if this process is killed here, and stay in
        the directory until the next ones come. No reader is waited for, and none waits.

        Args:
            state_dict: tensors by name, as ``Module.state_dict()`` gives them; nested mappings (a
                TensorDict) stay nested. From a GPU they are copied. No other thread may change
                them meanwhile.
            step: how far the learner is; given back by `newest`. It may go back.
            timeout: seconds to wait for another process that publishes right now.

        Returns:
            The version: 1, 2, ... It only grows, also across restarts. The consumer's version, by
            which a `StalenessAwareSampler` measures, is this one from then on, if it was smaller.

        Raises:
            SchemaMismatchError: not the names, dtypes and shapes of the first publish; the error
                names the first that differs, and nothing was changed.
            AttachTimeout: another process is in the middle of publishing, and stopped; ``pids``.
            SpaceError: no room for two copies. Only of the first publish.
            TypeError: a value is no tensor; or the storage is not one of this package.
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
        """The newest weights that any process has published, if they are newer than ``than``.

        Args:
            than: a version that is known already.

        Returns:
            `Weights`: ``version``, ``step`` and ``state_dict`` with tensors of the caller's own,
            as ``Module.load_state_dict`` takes them; None if there is nothing newer.

        Raises:
            CorruptBufferError: something else has written over them, or over their file.
            BufferUnlinkedError: the directory was removed; noticed within a second.
            TypeError, ShmBufferError: as of `publish`.

        Cost: about a microsecond where there is nothing newer, some ten before the first write to
        the buffer; else a copy and a checksum of them.
        """
        found = weights.newest(self._seat(), than)
        if found is None:
            return None
        leaves = found.form.leaves
        tensors = [
            torch.from_numpy(part).view(torch_dtype(leaf.dtype)).reshape(leaf.shape)
            if leaf.nbytes  # else torch may not look at it as another dtype
            else torch.empty(leaf.shape, dtype=torch_dtype(leaf.dtype))
            for leaf, part in zip(leaves, found.parts(), strict=True)
        ]
        return Weights(found.version, found.step, weights.nested(leaves, tensors))

    def _seat(self) -> Seat:
        """Where weights are handed over."""
        storage = self._storage
        if not isinstance(storage, RingBacked):
            raise TypeError(
                "weights are handed over beside a storage of this package, in its directory; "
                f"{type(storage).__name__} is not one"
            )
        if not storage.shared:
            raise weights.nowhere(storage.where)
        return storage.engine().seat


def _bytes(path: tuple[str, ...], value: Any) -> torch.Tensor:
    """A tensor on the CPU whose bytes lie in a row."""
    try:
        if not is_number(value):
            raise TypeError("only tensors and arrays can be published")
        return contiguous(as_tensor(value))
    except NO_TENSOR as error:
        raise TypeError(
            f"publish: '{'.'.join(path)}' is a {type(value).__name__} that cannot be stored "
            f"({error}); leave it out, or convert it"
        ) from error
