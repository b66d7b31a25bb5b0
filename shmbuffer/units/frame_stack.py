"""Stacks of the last frames. Each step is stored with one frame, and stacks are built by sampling.

stored      ... o1    o2    o3    o4    o5 ...      one frame per step
sample of step 4
  observation         o1    o2    o3    o4
  next observation          o2    o3    o4    o5
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shmbuffer.items.keys import GENERATION, INDEX
from shmbuffer.memory.format.leaf import Key, KeyPath, key_of, path_of
from shmbuffer.samplers.sampler import in_storage
from shmbuffer.storages.movers.native_rows import NativeRows
from shmbuffer.storages.movers.stacked_rows import ONE_ROW, STACK, StackedRows
from shmbuffer.tensors.form.tensor_nodes import TensorDictNode, entry_at
from shmbuffer.units.anchors import AnchorTrajectories, OfTrajectories, at_least
from shmbuffer.units.batch_entries import get_entry, rows_of, set_entry
from shmbuffer.units.unit import Expanded


class FrameStack(OfTrajectories):
    """Sample unit that returns a stack of the last frames for each sampled step.

    Each step is stored with one frame under each key in ``keys``, and with the next frame under
    ``("next", key)``. A sample has stacks in these entries instead:

    | entry | shape, dtype | content |
    |---|---|---|
    | ``key`` | ``[n, stack, *frame]``, dtype of the frame | the frames of the step and of the
      ``stack - 1`` steps before it, oldest first |
    | ``("next", key)`` | as above | the last ``stack - 1`` of these frames, then the next frame |
    | any other entry | ``[n, ...]`` | the entry of the step |

    If ``("next", key)`` is not stored, only ``key`` is stacked. ``index``, weights, priorities and
    ``index_generation`` belong to the step, so `update_priority` works as it does without a unit.

    - A stack never crosses the start of an episode. Instead, the first frame of the episode is
      repeated, as in gymnasium's ``FrameStackObservation`` with its default
      ``padding_type="reset"``. An episode ends at each step whose ``done_key`` is true.
    - A stack only contains frames of one stream of one collector, without a restart in between.
    - The oldest steps in the ring lose their history when earlier frames are overwritten. For these
      steps, the oldest remaining frame is repeated, as `Sequence` does with ``burn_in``. The steps
      after a slot that a crash left without an item are treated in the same way. At most
      ``stack - 1`` steps of a trajectory are affected.
    - All frames of a sample are validated against the tickets of their items. If one of the frames
      was overwritten during the read, another step is drawn.

    If the storage has ``share_next=True``, each frame is stored once.

    Args:
        stack: number of frames in a stack, at least 1.
        keys: keys of the entries that contain one frame each, of any shape and dtype.
        done_key: key of the flag that is True for the last step of an episode, terminated or
            truncated. With None, only the end of a stream ends an episode.

    Raises:
        ValueError: ``stack`` is below 1, or ``keys`` is empty, contains a key twice, or contains a
            key below ``"next"``.
        TypeError: a key is not a string or a tuple of strings.
        KeyError: raised by ``sample`` if the items have no tensor under a key in ``keys``, or no
            entry ``done_key``.

    Cost: the search for episode boundaries costs the same as in `SliceSampler`. One native call
        copies ``stack + 1`` frames per step from the buffer. A slower path reads ``n * stack``
        items and stacks them. It is used with several storage dimensions, with a ``collate_fn``,
        and if the items are not rows in the ring's own memory (`ListStorage`, records, GPU
        storages). The client without torch (``shmbuffer.numpy``) has no sample units.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import FrameStack, LazyTensorStorage
        >>> from shmbuffer import TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(10),
        ...     sample_unit=FrameStack(4, keys=("frame",)),
        ...     batch_size=400,
        ... )
        >>> film, done = torch.arange(11), torch.arange(10) == 9
        >>> after = TensorDict({"frame": film[1:], "done": done}, [10])
        >>> index = rb.extend(TensorDict({"frame": film[:-1], "next": after}, [10]))
        >>> sample = rb.sample()
        >>> at = sample["index"].tolist().index(6)
        >>> sample["frame"][at].tolist(), sample["next", "frame"][at].tolist()
        ([3, 4, 5, 6], [4, 5, 6, 7])
        >>> sample["frame"][sample["index"].tolist().index(1)].tolist()
        [0, 0, 0, 1]

    Source: Mnih et al., Human-level control through deep reinforcement learning, Nature 2015,
    Methods ("Preprocessing"); ``gymnasium.wrappers.FrameStackObservation``.
    """

    def __init__(
        self,
        stack: int,
        *,
        keys: Sequence[Key] = ("observation",),
        done_key: Key | None = ("next", "done"),
    ) -> None:
        self.stack = at_least("stack", stack, 1)
        self.keys = _checked(keys)
        self.done_key = done_key if done_key is None or isinstance(done_key, str) else (*done_key,)
        self._paths = tuple(map(path_of, self.keys))
        self._trajectories = AnchorTrajectories(self.done_key)

    def __repr__(self) -> str:
        shown = f"{self.stack}, keys={self.keys!r}, done_key={self.done_key!r}"
        return f"{type(self).__name__}({shown})"

    def _expand(self, index: Any, info: dict[Any, Any], storage: Any) -> Expanded | None:
        """Returns the items of each step's stack, or None if an item was overwritten."""
        with self._trajectories.lock:
            items = self._trajectories.histories(index, info, storage, self.stack)
        if items is None:
            return None
        if items.tickets is not None:
            info = {**info, GENERATION: torch.from_numpy(items.tickets)}
        return in_storage(storage, torch.from_numpy(items.elements)), info

    def assemble(self, data: Any, info: dict[Any, Any]) -> tuple[Any, dict[Any, Any]]:
        """Builds the batch from the items of all stacks."""
        sample = rows_of(data, slice(self.stack - 1, None, self.stack))
        for path in self._paths:
            frames = _tensor_at(data, path)
            if frames is None:
                raise KeyError(
                    f"{type(self).__name__}: the items have no tensor under {key_of(path)!r}; pass "
                    "the names of the entries with frames as keys"
                )
            stacks = frames.reshape(-1, self.stack, *frames.shape[1:])
            _put(sample, path, stacks)
            newest = _tensor_at(sample, ("next", *path))
            if newest is not None:
                _put(sample, ("next", *path), torch.cat((stacks[:, 1:], newest[:, None]), 1))
        return sample, self._of_anchors(info)

    def _of_anchors(self, info: dict[Any, Any]) -> dict[Any, Any]:
        """Reduces the index and generation of all frames to those of the drawn steps."""
        found = dict(info)
        for key in (INDEX, GENERATION):
            of_frames = found.get(key)
            if isinstance(of_frames, tuple):  # one tensor per storage dimension
                found[key] = tuple(map(self._newest, of_frames))
            elif of_frames is not None:
                found[key] = self._newest(of_frames)
        return found

    def _newest(self, of_frames: torch.Tensor) -> torch.Tensor:
        return of_frames[self.stack - 1 :: self.stack].contiguous()

    def _reader(self, rows: Any) -> StackReader | None:
        """Returns a reader that reads samples in one native call, or None if it is unsupported."""
        leaves = rows.leaves
        if type(self).assemble is not FrameStack.assemble or not isinstance(rows, NativeRows):
            return None
        number = {leaf.path: at for at, leaf in enumerate(leaves.leaves)}
        if leaves.lanes or any(path not in number for path in self._paths):
            return None
        forms = [ONE_ROW] * len(leaves.leaves)
        for path in self._paths:
            after, root = number.get(("next", *path)), number[path]
            forms[root] = STACK
            if after is not None:
                one, other = leaves.leaves[after], leaves.leaves[root]
                if (one.dtype, one.shape) != (other.dtype, other.shape):
                    return None
                forms[after] = root
            if not (_is_flat(leaves.node, path) and _is_flat(leaves.node, ("next", *path))):
                return None
        stacked = StackedRows.of(rows, self.stack, tuple(forms))
        return None if stacked is None else StackReader(self, stacked)


class StackReader:
    """Reads the samples of a `FrameStack` in one native call."""

    def __init__(self, unit: FrameStack, stacked: StackedRows) -> None:
        self._unit, self._stacked = unit, stacked
        self.leaves = stacked.leaves  # leaves of a sample, with stacks instead of frames
        self.read, self.fill = stacked.read, stacked.fill

    def draw(
        self, storage: Any, given: tuple[int, int, float | None], *into: tuple[int, ...]
    ) -> Any:
        """Draws a sample in one native call, like `StackedRows.draw`.

        Returns None if the trajectories of the storage cannot be followed natively.
        """
        trajectories = self._unit._trajectories
        with trajectories.lock:
            found = trajectories.look_up(storage)
            if found.following is None:
                return None
            known = found.table.native, found.following.follower
            return self._stacked.draw(given, known, *into)

    def build(self, tensors: list[torch.Tensor]) -> Any:
        """Builds the data of a sample in the structure of the items."""
        return self.leaves.build(tensors, (len(tensors[0]),))

    def of_anchors(self, info: dict[Any, Any]) -> dict[Any, Any]:
        """Reduces the index and generation of all frames to those of the drawn steps."""
        return self._unit._of_anchors(info)


def _checked(keys: Any) -> tuple[Key, ...]:
    """Checks the argument ``keys`` and returns it as a tuple.

    Raises:
        TypeError: ``keys`` is not a sequence, or a key is not a string or a tuple of strings.
        ValueError: ``keys`` is empty, or contains a key twice or a key below ``"next"``.
    """
    if isinstance(keys, str) or not isinstance(keys, Sequence):
        raise TypeError(f"keys must be a sequence of keys, such as ('observation',), got {keys!r}")
    if not keys:
        raise ValueError(
            "keys is empty; pass the names of the entries with frames, such as ('observation',)"
        )
    for key in keys:
        path = (key,) if isinstance(key, str) else key
        if not (isinstance(path, tuple) and path and all(isinstance(one, str) for one in path)):
            raise TypeError(f"keys contains {key!r}, which is not a string or a tuple of strings")
        if path[0] == "next":
            raise ValueError(
                f"keys contains {key!r}, but next frames are stacked together with the frames "
                f"before them; pass {key_of(path[1:]) if path[1:] else 'observation'!r} alone"
            )
    if len(set(map(path_of, keys))) < len(keys):
        raise ValueError(f"keys contains an entry twice: {tuple(keys)!r}; pass each entry once")
    return tuple(keys)


def _is_flat(node: Any, path: KeyPath) -> bool:
    """True if no TensorDict that contains the entry has batch dimensions within an item."""
    for key in path:
        if isinstance(node, TensorDictNode) and node.batch:
            return False
        node = getattr(node, "items", {}).get(key)
    return True


def _tensor_at(data: Any, path: KeyPath) -> torch.Tensor | None:
    """Returns the tensor at ``path``, or None if there is none."""
    found = entry_at(data, path)
    return found if isinstance(found, torch.Tensor) else None


def _put(data: Any, path: KeyPath, value: torch.Tensor) -> None:
    """Sets an entry of a batch whose containers are not shared with other data."""
    *inside, name = path
    for key in inside:
        data = get_entry(data, key)
    set_entry(data, name, value)
