"""Trees of arrays: the observations and actions of environments, with one row per environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmbuffer.errors import SchemaMismatchError

#: Keys under which gymnasium returns the last observation if it resets in the same step.
_FINAL = ("final_obs", "final_observation")

Tree = Any
"""An array ``[n, *shape]``, or a dict of trees."""


def floating(dtype: Any) -> np.dtype[Any]:
    """Converts an argument to a floating-point dtype of NumPy. Also accepts torch's dtypes.

    Raises:
        TypeError: the dtype is not float16, float32 or float64.
    """
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
    """Returns the observations after a step, before any environment was reset.

    Args:
        now: observations that the step returned.
        done: True for each environment whose episode has ended.
        info: dict that the step returned. It contains the final observations of environments that
            were reset in the same step.
        single: True for a single environment.

    Returns:
        The observations, and True for each environment whose final observation was in ``info``.
    """
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
    """True if an element of a tuple is a dict or an array and not a number."""
    return isinstance(part, Mapping) or np.ndim(part) > 0


def _form(tree: Tree) -> Any:
    """Returns the dtype and shape of each leaf, without the dimension of the environments."""
    if isinstance(tree, Mapping):
        return {key: _form(leaf) for key, leaf in tree.items()}
    return tree.dtype, tree.shape[1:]


def _forms(tree: Tree, path: tuple[str, ...] = ()) -> dict[str, str]:
    """Returns a text with the dtype and shape of each leaf, by the name of the leaf."""
    if isinstance(tree, Mapping):
        parts = (_forms(leaf, (*path, str(key))) for key, leaf in tree.items())
        return dict(chain.from_iterable(part.items() for part in parts))
    return {".".join(path): f"{tree.dtype}{list(tree.shape[1:])}"}


def require_form(now: Tree, before: Tree) -> None:
    """Raises SchemaMismatchError if the entries of a step differ from those of the previous step.

    Their keys, dtypes and shapes are compared.
    """
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
    """Adds dimensions of size 1 to ``rows``, ``[n]``, so that it broadcasts with ``leaf``."""
    return rows.reshape(-1, *[1] * (leaf.ndim - 1))


def mapped(function: Callable[..., Any], *trees: Tree) -> Tree:
    """Applies a function to the corresponding leaves of trees, and returns a tree of the results.

    All trees must have the same keys.
    """
    if isinstance(trees[0], Mapping):
        return {key: mapped(function, *(tree[key] for tree in trees)) for key in trees[0]}
    return function(*trees)
