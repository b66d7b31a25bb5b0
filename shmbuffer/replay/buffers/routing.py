"""What is written to an ensemble: which of its buffers each item is for."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from tensordict import TensorDict, TensorDictBase

from shmbuffer.memory import patience
from shmbuffer.replay.buffers.access import ConditionalUpdateResult
from shmbuffer.replay.buffers.ensemble_members import Members
from shmbuffer.replay.eager import eager
from shmbuffer.replay.keys import GENERATION, INDEX
from shmbuffer.replay.samplers.routes import routes
from shmbuffer.replay.samplers.rows import BUFFER_IDS
from shmbuffer.replay.writers.ensemble import refusal


class RoutedWrites(Members):
    """Writes: to the buffer that an entry or a dimension of the data names, else refused."""

    _routing_key: str | tuple[str, ...] | None
    _routing_dim: int | None

    @eager
    def add(self, data: Any, timeout: float | None = None) -> Any:
        """Write one item into the buffer that its entry ``routing_key`` names.

        Args:
            data: the item.
            timeout: see `extend`.

        Returns and raises as `extend`.
        """
        if self._routing_key is None:
            raise RuntimeError(refusal("an item was given to the ensemble"))
        if not isinstance(data, TensorDictBase) or data.batch_dims:
            raise ValueError("add() takes one item, a TensorDict with batch size []; use extend()")
        return self.extend(data.unsqueeze(0), timeout=timeout)[0]

    @eager
    def extend(
        self, data: Any, *, update_priority: bool | None = None, timeout: float | None = None
    ) -> Any:
        """Write each item of a batch into the buffer that ``routing_key`` or ``routing_dim`` names.

        Args:
            data: a TensorDict ``[...]``; it is flattened.
            update_priority: see `TensorDictReplayBuffer.extend`.
            timeout: seconds to wait for others, in all; see `ReplayBuffer.add`.

        Returns:
            A TensorDict ``[n]``, in the order of the flat data: ``"buffer_ids"``, and ``"index"``
            in that buffer.

        Raises:
            RuntimeError: the ensemble has neither of the two; write into ``ensemble[i]``.
            TypeError, ValueError: the data do not name buffers; nothing was changed.
            SchemaMismatchError, ...: see `ReplayBuffer.extend`; other buffers may have been written
                already.
        """
        if self._routing_key is None and self._routing_dim is None:
            raise RuntimeError(refusal("a batch was given to the ensemble"))
        if len(self._transform):
            data = self._transform.inv(data)
        items, ids = routed(data, len(self._rbs), self._routing_key, self._routing_dim)
        known = {} if update_priority is None else {"update_priority": update_priority}
        written: list[tuple[torch.Tensor, torch.Tensor]] = []
        with patience.within(timeout):
            for at in range(len(self._rbs)):
                rows = torch.nonzero(ids == at).flatten()
                if len(rows):
                    written.append((rows, self._rbs[at].extend(items[rows], **known)))
        index = torch.zeros(
            (len(ids), *(written[0][1].shape[1:] if written else ())), dtype=torch.int64
        )
        for rows, where in written:
            index[rows] = where
        return TensorDict({BUFFER_IDS: ids, INDEX: index}, [len(ids)])

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        """RuntimeError: change ``ensemble[i][index]``."""
        raise RuntimeError(
            f"the ensemble was told to change {index!r}, and not in which of its buffers: "
            "ensemble[i][index] = data"
        )

    def set_at_(self, key: str | tuple[str, ...], value: Any, index: Any) -> NoReturn:
        """RuntimeError: change ``ensemble[i]``."""
        raise RuntimeError(
            f"the ensemble was told to change {key!r}, and not in which of its buffers: "
            "ensemble[i].set_at_(key, value, index)"
        )

    @eager
    def update_if_present(self, *, index: Any, generation: Any, patch: Any) -> Any:
        """Change entries of the items of a sample that have not been written over since.

        Args:
            index: ``sample["index"]``.
            generation: ``sample["index_generation"]``.
            patch: TensorDict or dict of the entries that are to change, with the shape of the
                sample in front.

        Returns:
            `ConditionalUpdateResult` for the sample, flat.

        Raises:
            RuntimeError: a buffer keeps no generations; see `ReplayBuffer.update_if_present`. Other
                buffers may have been changed already.
        """
        patch = patch if isinstance(patch, TensorDictBase) else TensorDict(patch)
        entries = dict(patch.items(True, True))
        updated = []
        for part in routes(index, self._storage, {**entries, GENERATION: generation}):
            tickets = part.entries.pop(GENERATION)
            result = self._rbs[part.at].update_if_present(
                index=part.where, generation=tickets, patch=TensorDict(part.entries)
            )
            updated.append((part.rows, result.updated))
        flat = torch.zeros(sum(len(rows) for rows, _ in updated), dtype=torch.bool)
        for rows, which in updated:
            flat[rows] = which
        return ConditionalUpdateResult(flat)


def routed(
    data: Any, count: int, key: str | tuple[str, ...] | None, dim: int | None
) -> tuple[TensorDictBase, torch.Tensor]:
    """A batch, flat, and the number of the buffer of each item.

    Args:
        data: a TensorDict.
        count: how many buffers there are.
        key: entry with the numbers, one for each item.
        dim: or the dimension of the data with an entry for each buffer.

    Returns:
        The items ``[n]``, and int64 ``[n]``.

    Raises:
        TypeError: no TensorDict, or the numbers are no integers.
        KeyError: no such entry.
        ValueError: another number of numbers than of items, or a number of no buffer.
    """
    if not isinstance(data, TensorDictBase):
        raise TypeError(
            f"only TensorDicts are divided among the buffers, got {type(data).__name__}; write "
            "into one of them, ensemble[i].extend(data)"
        )
    if dim is not None:
        if not -data.batch_dims <= dim < data.batch_dims or data.batch_size[dim] != count:
            raise ValueError(
                f"routing_dim={dim} has an entry for each of the {count} buffers; the data have "
                f"batch size {list(data.batch_size)}"
            )
        shape = [1] * data.batch_dims
        shape[dim] = count
        numbers = torch.arange(count).reshape(shape).expand(data.batch_size)
        return _flat(data), numbers.reshape(-1)
    numbers = data.get(key, None)
    if numbers is None:
        raise KeyError(
            f"there is no entry {key!r} (routing_key) that says for which buffer an item is; the "
            f"data have {sorted(map(str, data.keys(True, True)))}"
        )
    if numbers.dtype is torch.bool or numbers.is_floating_point() or numbers.is_complex():
        raise TypeError(f"buffers are numbered by integers, got {numbers.dtype} in {key!r}")
    items = _flat(data)
    numbers = numbers.detach().cpu().long().reshape(-1)
    if len(numbers) != len(items):
        raise ValueError(f"{key!r} has {len(numbers)} numbers of buffers for {len(items)} items")
    wrong = numbers[(numbers < 0) | (numbers >= count)]
    if len(wrong):
        raise ValueError(f"{key!r} names buffer {int(wrong[0])}; this ensemble has {count}")
    return items, numbers


def _flat(data: TensorDictBase) -> TensorDictBase:
    """In one dimension. tensordict 0.12 cannot tell the size of one without items by itself."""
    return data.reshape(data.batch_size.numel())
