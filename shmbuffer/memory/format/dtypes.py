"""The dtypes that a leaf can have, and their names in NumPy, Arrow, HDF5 and tensordict.

This is the only list of dtypes. Storages, records, weights, samplers, exports and both kinds of
clients use it. To add a dtype, add a row. The core keeps no list of DLPack codes, because it takes
the code of each leaf from an example tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import numpy as np


@dataclass(frozen=True)
class DType:
    """A dtype of torch, described without torch."""

    name: str
    """Torch's name, without the prefix ``torch.``."""
    _: KW_ONLY
    bits: str = ""
    """NumPy's dtype of the same bits; empty if NumPy has this dtype under the same name."""
    numbers: str = ""
    """The smallest dtype of NumPy that holds the same numbers; empty if that is ``bits``."""
    arrow: str = ""
    """Arrow's numbers of the same bits, one or two of them; empty if Arrow has this dtype."""
    assigned: str = ""
    """Torch's dtype of the same size that ``tensor[index] = rows`` accepts; empty if it is this."""
    tensordict: bool = True
    """True if ``TensorDict.load_memmap`` reads it; false for float8 up to tensordict 0.15."""

    @property
    def in_numpy(self) -> bool:
        """True if NumPy has this dtype; otherwise, arrays hold its bits as unsigned integers."""
        return not self.bits

    @property
    def in_hdf5(self) -> bool:
        """True if HDF5 has this dtype; h5py stores the dtypes of NumPy, and no others."""
        return self.in_numpy

    @cached_property
    def array(self) -> np.dtype[Any]:
        """NumPy's dtype of an array with these bits."""
        return np.dtype(self.bits or self.name)

    @cached_property
    def itemsize(self) -> int:
        """Bytes of one number."""
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
"""The dtypes that can be stored, by torch's names. All are opaque bytes to the engine."""


def require_dtypes(
    leaves: Iterable[tuple[str, str]],
    accepts: Callable[[DType], bool],
    where: str,
    reader: str,
    remedy: str,
) -> None:
    """Raises TypeError for the first leaf whose dtype a format does not support.

    Args:
        leaves: The name of each leaf, and the name of its dtype.
        accepts: Returns whether the format supports a dtype of the table.
        where: The file, or the class that writes.
        reader: The format, or the program that reads it.
        remedy: Advice for the caller.
    """
    for name, dtype in leaves:
        known = DTYPES.get(dtype)
        if known is None or not accepts(known):
            raise TypeError(
                f"{where}: {name!r} is {dtype}, which {reader} does not support; {remedy}"
            )
