"""NumPy version of the power that turns priorities into masses, bit-identical to the core's."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_ONE, _ROOT = np.array([1.0, np.sqrt(0.5)]).view(np.uint64)
_LOG = [2.8853900817779268 / odd for odd in range(1, 22, 2)]
_EXP = [1.0 / float(product) for product in np.cumprod(range(1, 14))]


def masses_of(raw: Floats, alpha: float, eps: float) -> Floats:
    """Computes (raw + eps) ** alpha as `power.c` does.

    Args:
        raw: float64.
        alpha: at least 0.
        eps: added to each priority.
    """
    x: Floats = np.asarray(raw, np.float64) + eps
    if alpha == 1:
        return x
    with np.errstate(all="ignore"):
        small = x < np.finfo(np.float64).tiny
        fraction, n = _power(np.where(small, x * 2.0**54, x), np.where(small, -54.0, 0.0), alpha)
        found = np.ldexp(fraction, np.clip(np.nan_to_num(n), -2000, 2000).astype(np.int64))
        found = np.where(np.abs(n) < 2000, found, np.where(n > 0, np.inf, 0.0))
    found = np.where(x > 0, found, np.where(x == 0, 0.0, np.nan))
    found = np.where(np.isinf(x) & (x > 0), np.inf, found)
    return found if alpha else np.ones_like(x)


def _power(x: Floats, more: Floats, alpha: float) -> tuple[Floats, Floats]:
    bits: NDArray[np.uint64] = x.view(np.uint64)
    biased = (bits + (_ONE - _ROOT)) >> np.uint64(52)
    e = biased.astype(np.float64) - 1023 + more
    m = (bits - (biased << np.uint64(52)) + _ONE).view(np.float64)
    s = (m - 1) / (m + 1)
    z = s * s
    z2 = z * z
    z4 = z2 * z2
    a = _LOG
    series = (
        ((a[1] + z * a[2]) + z2 * (a[3] + z * a[4]))
        + z4 * ((a[5] + z * a[6]) + z2 * (a[7] + z * a[8]))
        + (z4 * z4) * (a[9] + z * a[10])
    )
    head = float((np.array([alpha]).view(np.uint64) & ~np.uint64(0x7FF)).view(np.float64)[0])
    part, rest = head * e, (alpha - head) * e + alpha * (s * a[0] + s * z * series)
    n = np.rint(part + rest)
    t = ((part - n) + rest) * 0.69314718055994531
    t2 = t * t
    t4 = t2 * t2
    b = _EXP
    high = (
        ((b[1] + t * b[2]) + t2 * (b[3] + t * b[4]))
        + t4 * ((b[5] + t * b[6]) + t2 * (b[7] + t * b[8]))
        + (t4 * t4) * ((b[9] + t * b[10]) + t2 * (b[11] + t * b[12]))
    )
    return 1 + (t + t2 * high), n
