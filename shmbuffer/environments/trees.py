"""Observations and actions of environments: arrays with a row for each, or dicts of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmbuffer.errors import SchemaMismatchError

#: Where gymnasium puts the last observation of an episode that it has reset in the same call.
_FINAL = ("final_obs", "final_observation")

Tree = Any
"""An array ``[n, *shape]``, or a dict of trees."""


def floating(dtype: Any) -> np.dtype[Any]:
    """Returns a floating point dtype of NumPy; also accepts torch's dtype of the same name."""
    name = str(dtype).removeprefix("torch.") if type(dtype).__module__ == "torch" else dtype
    try:
        found = np.dtype(name)
    except TypeError:
        found = None
    if found is None or found.name not in ("float16", "float32", "float64"):
        raise TypeError(
            "Recorder: dtype must be float16, float32, float64, or None to store all entries "
            f"without conversion; got {dtype!r}"
        )
    return found


def final_observations(
    now: Tree, done: NDArray[np.bool_], info: Mapping[str, Any], single: bool
) -> tuple[Tree, NDArray[np.bool_]]:
    """Returns the observations after a step, and a mask of those that differ from ``now``."""
    key = next((key for key in _FINAL if key in info), None)
    if key is None:
        return now, np.zeros_like(done)
    there = done & np.asarray(info.get(f"_{key}", done), np.bool_)
    final, last = mapped(np.copy, now), [info[key]] if single else info[key]
    for row in np.flatnonzero(there).tolist():
        one = mapped(itemgetter(row), last) if isinstance(last, Mapping) else last[row]
        _set_row(final, row, one)
    return final, there


def _set_row(tree: Tree, row: int, values: Tree) -> None:
    if isinstance(tree, Mapping):
        for key, leaf in tree.items():
            _set_row(leaf, row, values[key])
    else:
        tree[row] = values


def has_parts(part: Any) -> bool:
    """True if a part of a tuple is a dict or an array, not a number."""
    return isinstance(part, Mapping) or np.ndim(part) > 0


def _form(tree: Tree) -> Any:
    """Returns a tree with the dtype and shape of each leaf, without the environments."""
    if isinstance(tree, Mapping):
        return {key: _form(leaf) for key, leaf in tree.items()}
    return tree.dtype, tree.shape[1:]


def _forms(tree: Tree, path: tuple[str, ...] = ()) -> dict[str, str]:
    """Returns the dtype and shape of each leaf as text, by the leaf's name."""
    if isinstance(tree, Mapping):
        parts = (_forms(leaf, (*path, str(key))) for key, leaf in tree.items())
        return dict(chain.from_iterable(part.items() for part in parts))
    return {".".join(path): f"{tree.dtype}{list(tree.shape[1:])}"}


def require_form(now: Tree, before: Tree) -> None:
    """Raises SchemaMismatchError if a step has other entries than the one before."""
    if _form(now) == _form(before):
        return
    found, expected = _forms(now), _forms(before)
    for name in {**expected, **found}:
        if found.get(name) != expected.get(name):
            raise SchemaMismatchError(
                f"Recorder.step: '{name}' is {found.get(name, 'missing')}, but was "
                f"{expected.get(name, 'missing')} in the previous step; pass the same entries, "
                "dtypes and shapes in each step. Nothing was written",
                leaf=name,
                expected=expected.get(name),
                found=found.get(name),
            )


def beside(rows: NDArray[np.bool_], leaf: NDArray[Any]) -> NDArray[np.bool_]:
    """Returns ``rows`` with the number of dimensions of ``leaf``."""
    return rows.reshape(-1, *[1] * (leaf.ndim - 1))


def mapped(function: Callable[..., Any], *trees: Tree) -> Tree:
    """Returns a tree with the results of a function for the leaves."""
    if isinstance(trees[0], Mapping):
        return {key: mapped(function, *(tree[key] for tree in trees)) for key in trees[0]}
    return function(*trees)
