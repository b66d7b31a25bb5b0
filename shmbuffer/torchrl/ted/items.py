"""Restores items from the flat form to their slots in the ring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, is_non_tensor

from shmbuffer.errors import SchemaMismatchError
from shmbuffer.items.keys import OWN_KEYS
from shmbuffer.memory.format.leaf import KeyPath
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensor_nodes import fields
from shmbuffer.torchrl.ted.entries import (
    CUTS,
    NEXT,
    ROOT,
    Roles,
    assemble,
    constant,
    dotted,
    entries,
    names,
    shape_of,
)
from shmbuffer.torchrl.ted.episodes import Episodes, as_bytes, flags_of, transfer


class Flat2TED(Roles):
    """Load hook that restores the items that `TED2Flat` saved.

    Flags at the root are restored as False, unless the original data had other flags or none.

    Args:
        done_key: key in the flat form of the flag that marks the end of an episode. A leading
            ``"next"``, as in `TED2Flat`, is ignored.
        shift_key, is_full_key, done_keys, reward_keys: the same values as for `TED2Flat`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import Flat2TED, TED2Flat
        >>> data = TensorDict({
        ...     "observation": torch.tensor([0.0, 1.0]),
        ...     "next": {
        ...         "observation": torch.tensor([1.0, 2.0]),
        ...         "done": torch.tensor([[False], [True]]),
        ...     },
        ... }, batch_size=[2])
        >>> Flat2TED()(TED2Flat()(data))["next", "observation"].tolist()
        [1.0, 2.0]

    Source: ``torchrl.data.Flat2TED``.
    """

    def __call__(self, data: Any, out: Any = None) -> Any:
        """Returns the items at their places in the ring, in ``out`` or in a new TensorDict.

        Raises:
            ValueError: the data were not written by the matching save hook, or with other keys.
            SchemaMismatchError: ``out`` does not have the same entries as the data.
        """
        saved = entries(data)
        kind = type(self).__name__
        episodes = Episodes(
            shape_of(saved, kind),
            constant(saved, self._shift_path, kind),
            constant(saved, self._is_full_path, kind),
        )
        found = self._rows(saved, episodes)
        has_defaults = ROOT[0] not in fields(data)
        plan = self._plan(found, episodes, has_defaults)
        if out is None:
            target = {
                path: cpu.zeros((*episodes.shape, *leaf.shape[1:]), dtype=leaf.dtype)
                for path, (leaf, _) in plan.items()
            }
        else:
            target = {path: leaf for path, leaf in entries(out).items() if not is_non_tensor(leaf)}
            self._require_fit(plan, target, episodes)
        items = episodes.holds.nonzero()[:, 0]
        for path, (leaf, at) in plan.items():
            if path in target:
                _fill(target[path], episodes.elements[items], leaf, at[items], episodes.rows)
        others = self._other_entries(found, episodes)
        if out is None:
            return assemble({**target, **others}, episodes.shape)
        for path, value in others.items():
            out[path] = value
        return out

    def _rows(self, saved: dict[KeyPath, Any], episodes: Episodes) -> dict[KeyPath, Any]:
        """Returns the saved entries as rows, and marks the ends of trajectories in ``episodes``."""
        done = saved.get(self._end)
        if not isinstance(done, torch.Tensor) or done.numel() != episodes.rows:
            raise ValueError(
                f"{type(self).__name__}(done_key={self.done_key!r}): the data have no entry with "
                f"this key and one value for each of {list(episodes.shape)} items. They have "
                f"{names(saved)}; pass the key of the entry that marks where episodes end as "
                "done_key"
            )
        episodes.end(flags_of(done, episodes.rows))
        if (cuts := saved.get(CUTS)) is not None:
            where = cpu.zeros(episodes.rows, dtype=torch.bool)
            where[cuts.as_subclass(torch.Tensor)] = True
            episodes.end(where)
        return saved

    def _plan(
        self, found: Mapping[KeyPath, Any], episodes: Episodes, has_defaults: bool
    ) -> dict[KeyPath, tuple[torch.Tensor, torch.Tensor]]:
        """Returns the source of each entry of the items.

        The source consists of a saved leaf, and the row in this leaf for each row of the ring.
        ``has_defaults`` is True if the flags at the root were not saved, because all are False.
        """
        plan: dict[KeyPath, tuple[torch.Tensor, torch.Tensor]] = {}
        rows = cpu.arange(episodes.rows)
        # For a ring that has not wrapped, TorchRL may omit rows at the end that contain no items.
        needed = int(episodes.steps[episodes.holds].max()) + 2
        for path, leaf in found.items():
            if is_non_tensor(leaf) or path in self._reserved_paths:
                continue
            count = leaf.shape[0]
            if count != episodes.rows and not needed <= count <= episodes.kept:
                raise ValueError(
                    f"{type(self).__name__}: entry {dotted(path)!r} has {count} rows, but "
                    f"{episodes.rows} items of {episodes.kept - episodes.rows} trajectories need "
                    f"{episodes.rows}, or {episodes.kept} if it is also under 'next'. The data are "
                    "incomplete, or done_key, done_keys or reward_keys differ from those with "
                    "which they were written"
                )
            if path[0] == ROOT[0]:
                plan[path[1:]] = leaf, rows
            elif path in self._flags:
                plan[NEXT, *path] = leaf, rows
                if has_defaults:
                    plan[path] = cpu.zeros(1, dtype=leaf.dtype).expand(leaf.shape), rows
            elif path in self._rewards:
                plan[NEXT, *path] = leaf, rows
            elif count == episodes.rows:
                plan[path] = leaf, rows
            else:
                plan[path] = leaf, episodes.steps
                plan[NEXT, *path] = leaf, episodes.steps + 1
        return plan

    def _other_entries(
        self, found: Mapping[KeyPath, Any], episodes: Episodes
    ) -> dict[KeyPath, Any]:
        """Returns the entries that are not tensors, with each object at its place in the ring."""
        others: dict[KeyPath, Any] = {}
        for path, value in found.items():
            if path in self._reserved_paths or not is_non_tensor(value):
                continue
            if isinstance(value, NonTensorStack):
                objects: list[Any] = [None] * episodes.rows
                for at, one in zip(episodes.elements.tolist(), value.tolist(), strict=True):
                    objects[at] = one
                others[path] = _stacked(objects, episodes.shape)
            else:
                others[path] = NonTensorData(value.data, batch_size=episodes.shape)
        return others

    def _require_fit(
        self,
        plan: Mapping[KeyPath, tuple[torch.Tensor, torch.Tensor]],
        target: Mapping[KeyPath, torch.Tensor],
        episodes: Episodes,
    ) -> None:
        """Raises SchemaMismatchError if ``target`` does not have the entries of the plan."""
        where = type(self).__name__
        for path, (leaf, _) in plan.items():
            if (there := target.get(path)) is None:
                if path in self._flags or path[0] in OWN_KEYS:  # entries that TorchRL adds
                    continue
                raise SchemaMismatchError(
                    f"{where}: leaf {dotted(path)!r} of the saved items is not in the target, "
                    f"which has {names(target)}; load them into a new buffer",
                    leaf=dotted(path),
                    expected=names(target),
                    found=names(plan),
                )
            expected = f"{there.dtype}{list(there.shape)}"
            found = f"{leaf.dtype}{[*episodes.shape, *leaf.shape[1:]]}"
            if expected != found:
                raise SchemaMismatchError(
                    f"{where}: leaf {dotted(path)!r} is {expected} in the target, and {found} in "
                    "the saved items; load them into a buffer of that size and schema",
                    leaf=dotted(path),
                    expected=expected,
                    found=found,
                )
        if missing := {path for path in target if path not in plan and path[0] not in OWN_KEYS}:
            raise SchemaMismatchError(
                f"{where}: the target has {names(missing)}, which the saved items do not have; "
                f"they have {names(plan)}. Load them into a new buffer",
                leaf=names(missing),
                expected=names(target),
                found=names(plan),
            )


def _fill(
    target: torch.Tensor, to: torch.Tensor, leaf: torch.Tensor, at: torch.Tensor, elements: int
) -> None:
    """Copies row ``at[i]`` of ``leaf`` to element ``to[i]`` of ``target``, on any device."""
    staged = target.detach().as_subclass(torch.Tensor).cpu().contiguous()
    transfer(as_bytes(staged, elements), to, as_bytes(leaf, leaf.shape[0]), at)
    if staged.data_ptr() != target.data_ptr():
        target.copy_(staged)


def _stacked(objects: Sequence[Any], shape: Sequence[int]) -> NonTensorStack:
    """Returns a NonTensorStack ``[*shape]`` of objects, which are in C order."""
    if len(shape) == 1:
        return NonTensorStack(*(NonTensorData(one) for one in objects))
    size = len(objects) // shape[0]
    parts = [objects[start : start + size] for start in range(0, len(objects), size)]
    return NonTensorStack(*(_stacked(part, shape[1:]) for part in parts))
