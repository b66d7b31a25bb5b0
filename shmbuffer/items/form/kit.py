"""Functions for the arrays of one library, collected in a kit.

`ARRAYS` is the kit for NumPy's arrays. ``tensors.form.tensor_kit`` defines the kit for torch's
tensors and TensorDicts. A buffer selects a kit when it is opened, so that calls need no lookup.
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
"""Returns dtype and shape of a leaf of a first batch; TypeError if it is not an array."""


class Kit:
    """The kit for NumPy's arrays."""

    structure = Structure()
    private_remedy = "leave it out"
    """End of the error message for data that cannot be shared between processes."""
    device: Any = None
    """Device of the arrays for `build`; None if the family has no devices."""

    def form_of(self, value: Any, path: KeyPath) -> tuple[str, Sequence[int]]:
        """Returns dtype name and shape of a leaf of the first batch; TypeError for other data."""
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
        """Returns the dtype name and the array of a value; see `arrays.like`."""
        return like(value, dtype)

    def dtype(self, name: str) -> Any:
        """Returns the dtype of the arrays of a leaf."""
        return DTYPES[name].array

    def wanted(self, dtype: str, shape: tuple[int, ...]) -> tuple[Any, ...]:
        """Returns the description of a leaf that `addresses` compares with its values."""
        return shape, self.dtype(dtype)

    def addresses(self, values: list[Any], wanted: list[tuple[Any, ...]]) -> list[int]:
        """Returns the address of each leaf's bytes; 0 for a leaf that needs conversion."""
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
        """Returns the array, or a copy whose bytes are its numbers in C order."""
        return np.ascontiguousarray(array).reshape(array.shape)

    def copied(self, array: Any) -> Any:
        """Returns a copy of an array."""
        return array.copy()

    def template(self, dtype: str, shape: tuple[int, ...]) -> Any:
        """Returns a template of an array for `outputs`."""
        return shape, self.dtype(dtype)

    def outputs(self, templates: Sequence[Any]) -> tuple[list[Any], Sequence[int]]:
        """Returns new arrays with arbitrary contents, and their addresses."""
        arrays = [np.empty(*template) for template in templates]
        return arrays, tuple(map(address, arrays))

    def empty(self, dtype: str, count: int) -> Any:
        """Returns a new array ``[count]`` with arbitrary contents."""
        return np.empty(count, dtype)

    def from_numpy(self, array: NDArray[Any]) -> Any:
        """Returns an array of this kit's library over the same memory."""
        return array

    def as_numpy(self, array: Any) -> NDArray[Any]:
        """Returns a NumPy array over the memory of an array of this kit's library."""
        return array  # type: ignore[no-any-return]


ARRAYS = Kit()
