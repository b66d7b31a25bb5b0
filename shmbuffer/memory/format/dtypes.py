"""The dtypes that a leaf can have, with their equivalents in NumPy, Arrow, HDF5 and tensordict.

This is the only list of dtypes in the package. Storages, records, weights, samplers, exports and
the clients for torch and NumPy use it. To support another dtype, add a row to `DTYPES`. The C core
does not need a list of DLPack type codes, because it gets the code of each leaf from an example
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import numpy as np


@dataclass(frozen=True)
class DType:
    """Description of one of torch's dtypes, which can be used without importing torch."""

    name: str
    """Torch's name of the dtype, without the prefix ``torch.``."""
    _: KW_ONLY
    bits: str = ""
    """NumPy's dtype for arrays of the same bits; empty if NumPy has a dtype with this name."""
    numbers: str = ""
    """NumPy's smallest dtype that can represent all values exactly; empty if it is ``bits``."""
    arrow: str = ""
    """Arrow type whose numbers, one or two per element, have the same bits.

    It is empty if Arrow has this dtype.
    """
    assigned: str = ""
    """Torch dtype of the same size for which ``tensor[index] = rows`` works.

    It is empty if the assignment works for this dtype itself.
    """
    tensordict: bool = True
    """True if ``TensorDict.load_memmap`` can read it; false for float8 up to tensordict 0.15."""

    @property
    def in_numpy(self) -> bool:
        """True if NumPy has this dtype. If not, arrays contain its bits as unsigned integers."""
        return not self.bits

    @property
    def in_hdf5(self) -> bool:
        """True if h5py can store this dtype. It supports exactly the dtypes that NumPy has."""
        return self.in_numpy

    @cached_property
    def array(self) -> np.dtype[Any]:
        """NumPy's dtype for arrays of these bits."""
        return np.dtype(self.bits or self.name)

    @cached_property
    def itemsize(self) -> int:
        """Size of a value in bytes."""
        return self.array.itemsize


_FLOAT8 = dict[str, Any](bits="uint8", numbers="float32", arrow="uint8", tensordict=False)

DTYPES: Mapping[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("bool"),
        DType("uint8"),
        DType("int8"),
        DType("float8_e4m3fn", **_FLOAT8),
        DType("float8_e5m2", **_FLOAT8),
        DType("float8_e4m3fnuz", **_FLOAT8),
        DType("float8_e5m2fnuz", **_FLOAT8),
        DType("uint16", assigned="int16"),
        DType("int16"),
        DType("float16"),
        DType("bfloat16", bits="uint16", numbers="float32", arrow="int16"),
        DType("uint32", assigned="int32"),
        DType("int32"),
        DType("float32"),
        DType("complex32", bits="uint32", numbers="complex64", arrow="float16"),
        DType("uint64", assigned="int64"),
        DType("int64"),
        DType("float64"),
        DType("complex64", arrow="float32"),
        DType("complex128", arrow="float64"),
    )
}
"""The dtypes that can be stored, by torch's names. The engine treats all values as bytes."""


def require_dtypes(
    leaves: Iterable[tuple[str, str]],
    accepts: Callable[[DType], bool],
    where: str,
    reader: str,
    remedy: str,
) -> None:
    """Raises TypeError if a format does not support the dtype of a leaf. Names the first such leaf.

    Args:
        leaves: Pairs of the name and the dtype's name of each leaf.
        accepts: Function that returns True if the format supports a dtype.
        where: Name of the file, or of the class that writes the leaves, for the message.
        reader: Name of the format, or of the program that reads it, for the message.
        remedy: Advice to the user at the end of the message.
    """
    for name, dtype in leaves:
        known = DTYPES.get(dtype)
        if known is None or not accepts(known):
            raise TypeError(
                f"{where}: {name!r} is {dtype}, which {reader} does not support; {remedy}"
            )
