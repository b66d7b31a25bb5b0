"""The functions that depend on an array library, collected in a kit.

`ARRAYS` is the kit for NumPy's arrays. ``tensors.form.tensor_kit`` defines the kit for torch's
tensors and TensorDicts. A buffer selects its kit when it is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmbuffer._native._core import address
from shmbuffer.items.form.arrays import NO_ARRAY, is_array, like, named
from shmbuffer.items.form.mismatch import not_a_tensor
from shmbuffer.items.form.structure import Structure
from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.memory.format.leaf import KeyPath

FormOf = Callable[[Any, KeyPath], tuple[str, Sequence[int]]]
"""A function that returns the dtype name and the shape of a leaf in the first batch.

Its arguments are the value and the path of the leaf. It raises TypeError for other values.
"""


class Kit:
    """Functions for NumPy arrays. A subclass has the same functions for another library."""

    structure = Structure()
    private_remedy = "leave it out"
    """Advice at the end of the error message for data that processes cannot share."""
    device: Any = None
    """Device on which data are built. It is None if the library has no devices."""

    def form_of(self, value: Any, path: KeyPath) -> tuple[str, Sequence[int]]:
        """Returns the dtype name and the shape of a leaf in the first batch.

        Raises TypeError if the value is not an array or has an unsupported dtype.
        """
        try:
            name, array = named(value)
        except NO_ARRAY as error:
            raise TypeError(not_a_tensor(value, error)) from error
        if name not in DTYPES:
            raise TypeError(not_a_tensor(value, TypeError(f"its dtype is {name}")))
        return name, array.shape

    def is_leaf(self, value: Any) -> bool:
        """True if a value can be converted to an array."""
        return is_array(value) or isinstance(value, (list, tuple))

    def like(self, value: Any, dtype: str) -> tuple[str, Any]:
        """Converts a value to an array like `arrays.like`. Returns the dtype name and the array."""
        return like(value, dtype)

    def dtype(self, name: str) -> Any:
        """Returns this library's dtype for the dtype name of a leaf."""
        return DTYPES[name].array

    def wanted(self, dtype: str, shape: tuple[int, ...]) -> tuple[Any, ...]:
        """Returns the expected shape and dtype of a leaf, in the form that `addresses` expects."""
        return shape, self.dtype(dtype)

    def addresses(self, values: list[Any], wanted: list[tuple[Any, ...]]) -> list[int]:
        """Returns the address of the bytes of each value, or 0 if the value must be converted.

        ``wanted`` has the result of `wanted` for each value.
        """
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
        """Returns the array itself if it is C-contiguous, otherwise a C-contiguous copy."""
        return np.ascontiguousarray(array).reshape(array.shape)

    def copied(self, array: Any) -> Any:
        """Returns a copy of an array."""
        return array.copy()

    def template(self, dtype: str, shape: tuple[int, ...]) -> Any:
        """Returns a description of an array that `outputs` can allocate."""
        return shape, self.dtype(dtype)

    def outputs(self, templates: Sequence[Any]) -> tuple[list[Any], Sequence[int]]:
        """Allocates an uninitialized array per template. Returns the arrays and their addresses."""
        arrays = [np.empty(*template) for template in templates]
        return arrays, tuple(map(address, arrays))

    def empty(self, dtype: str, count: int) -> Any:
        """Allocates an uninitialized array ``[count]``."""
        return np.empty(count, dtype)

    def from_numpy(self, array: NDArray[Any]) -> Any:
        """Converts a NumPy array to an array of this library that shares its memory."""
        return array

    def as_numpy(self, array: Any) -> NDArray[Any]:
        """Converts an array of this library to a NumPy array that shares its memory."""
        return array  # type: ignore[no-any-return]


ARRAYS = Kit()
