"""Kits: the functions on arrays that the code which stores items needs, one kit for each family.

`ARRAYS` is the kit of NumPy's arrays; ``tensors.form.kit`` has that of torch's tensors and
TensorDicts. A buffer binds one kit when it is opened, so that a call looks nothing up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmbuffer._native._core import address
from shmbuffer.items.arrays import NO_ARRAY, is_array, like, named
from shmbuffer.items.mismatch import not_a_tensor
from shmbuffer.items.structure import Structure
from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.memory.format.leaf import KeyPath

FormOf = Callable[[Any, KeyPath], tuple[str, Sequence[int]]]
"""Gives dtype and shape of a leaf of a first batch; TypeError if it is no array."""


class Kit:
    """NumPy's arrays."""

    structure = Structure()
    private_remedy = "leave it out"
    """The end of the error for data that processes cannot share."""
    device: Any = None
    """The device of the arrays that `build` is given; None if the family has no devices."""

    def form_of(self, value: Any, path: KeyPath) -> tuple[str, Sequence[int]]:
        """Name of the dtype, and shape, of a leaf of a first batch; TypeError if it is none."""
        try:
            name, array = named(value)
        except NO_ARRAY as error:
            raise TypeError(not_a_tensor(value, error)) from error
        if name not in DTYPES:
            raise TypeError(not_a_tensor(value, TypeError(f"its dtype is {name}")))
        return name, array.shape

    def is_leaf(self, value: Any) -> bool:
        """True if a value can become an array."""
        return is_array(value) or isinstance(value, (list, tuple))

    def like(self, value: Any, dtype: str) -> tuple[str, Any]:
        """The name of the dtype and the array of a value; see `arrays.like`."""
        return like(value, dtype)

    def dtype(self, name: str) -> Any:
        """The dtype of the arrays that hold a leaf."""
        return DTYPES[name].array

    def wanted(self, dtype: str, shape: tuple[int, ...]) -> tuple[Any, ...]:
        """The form of a leaf, for `addresses` to compare with."""
        return shape, self.dtype(dtype)

    def addresses(self, values: list[Any], wanted: list[tuple[Any, ...]]) -> list[int]:
        """Where the bytes of each leaf are; 0 for one that has to be converted first."""
        return [
            address(value)
            if type(value) is np.ndarray
            and value.dtype is dtype
            and value.shape == shape
            and value.flags.c_contiguous
            else 0
            for value, (shape, dtype) in zip(values, wanted, strict=True)
        ]

    def contiguous(self, array: Any) -> Any:
        """The array, or a copy whose bytes are its numbers in C order."""
        return np.ascontiguousarray(array).reshape(array.shape)

    def copied(self, array: Any) -> Any:
        """A copy of an array."""
        return array.copy()

    def template(self, dtype: str, shape: tuple[int, ...]) -> Any:
        """The form of an array, for `outputs` to make it."""
        return shape, self.dtype(dtype)

    def outputs(self, templates: Sequence[Any]) -> tuple[list[Any], Sequence[int]]:
        """New arrays, and their addresses."""
        arrays = [np.empty(*template) for template in templates]
        return arrays, tuple(map(address, arrays))

    def empty(self, dtype: str, count: int) -> Any:
        """A new array ``[count]``."""
        return np.empty(count, dtype)

    def from_numpy(self, array: NDArray[Any]) -> Any:
        """An array of the family over the same memory."""
        return array

    def as_numpy(self, array: Any) -> NDArray[Any]:
        """The reverse of `from_numpy`."""
        return array  # type: ignore[no-any-return]


ARRAYS = Kit()
