"""Which members of an ensemble an index names."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def members(index: Any, count: int, what: str) -> int | list[int]:
    """The member at an int, the members of anything else.

    Args:
        index: int, slice, Ellipsis, or a list, range, array or tensor of ints (or of booleans, one
            for each member).
        count: how many there are.
        what: of the ensemble, for messages.

    Raises:
        IndexError: there is no such member, or it is no index.
        TypeError: floating-point numbers.
        RuntimeError: more than one dimension.
    """
    if index is Ellipsis:
        return list(range(count))
    if isinstance(index, slice):
        return list(range(count))[index]
    if isinstance(index, torch.Tensor):
        index = index.detach().cpu().numpy()
    if not isinstance(index, (int, np.integer, list, range, np.ndarray)):
        raise IndexError(
            f"{index!r} names no {what}: an int, a slice, Ellipsis, or a list, range, array or "
            "tensor of ints does"
        )
    numbers = np.asarray(index)
    if numbers.ndim > 1:
        raise RuntimeError(
            f"the {what}s of an ensemble lie in one row, so an index has one dimension; this one "
            f"has {numbers.ndim}"
        )
    if numbers.dtype == np.bool_ and numbers.shape == (count,):
        numbers = np.nonzero(numbers)[0]
    if not np.issubdtype(numbers.dtype, np.integer) and numbers.size:
        raise TypeError(f"{what}s are named by integers, got {numbers.dtype} in {index!r}")
    beyond = numbers[(numbers < -count) | (numbers >= count)]
    if beyond.size:
        raise IndexError(f"there is no {what} {int(beyond.flat[0])}; this ensemble has {count}")
    return (numbers.astype(np.int64) % count).tolist()  # type: ignore[no-any-return]


def is_everything(index: Any) -> bool:
    """Whether an index names all members in their order."""
    return index is Ellipsis or (isinstance(index, slice) and index == slice(None))
