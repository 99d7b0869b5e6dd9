"""The k-th largest magnitude of a vector that is only seen in pieces, exactly, from two histograms.

Without its sign, the bit pattern of a float32 is an integer in the order of the magnitudes. The first histogram counts
its upper half and tells in which bucket the k-th largest is, the second counts the lower half within that bucket.
Counts add up over tiles, tensors and processes.
"""

import numpy as np
import torch
from torch import Tensor

from . import kernels
from .codec import array_of


__all__ = ["BUCKETS", "count_lower", "count_upper", "find_bucket", "magnitude_of"]

_HALF = 16
# Of either histogram: 16 bits, the sign being one of the upper half.
BUCKETS = 2**_HALF


def count_upper(values: Tensor, counts: np.ndarray) -> None:
    """Count how many values have each upper half; zeros are not counted.

    Args:
        values (`Tensor`):
            float32, flat, on any device.
        counts (`np.ndarray`):
            int64, of length `BUCKETS`: counts to add to, in place.
    """
    if kernels.compiled:
        kernels.compiled.histogram(array_of(values.cpu()), -1, counts)
        return
    bits = _magnitude_bits(values)
    counts += np.bincount(bits >> _HALF, minlength=BUCKETS)
    # to count all and take zeros off is several times as fast as to pick the others out
    counts[0] -= bits.size - np.count_nonzero(bits)


def count_lower(values: Tensor, upper: int, counts: np.ndarray) -> None:
    """Count how many values with this upper half have each lower half. Arguments as [`count_upper`]."""
    if kernels.compiled:
        kernels.compiled.histogram(array_of(values.cpu()), upper, counts)
        return
    bits = _magnitude_bits(values)
    inside = bits[bits >> _HALF == upper]
    counts += np.bincount(inside[inside > 0] & (BUCKETS - 1), minlength=BUCKETS)


def find_bucket(counts: np.ndarray, rank: int) -> tuple[int, int] | None:
    """Where the `rank`-th largest is (from 1): the bucket and the rank in it, or `None` if fewer were counted."""
    from_above = np.cumsum(counts[::-1])
    position = int(np.searchsorted(from_above, rank))
    if position == len(counts):
        return None
    above = int(from_above[position - 1]) if position else 0
    return len(counts) - 1 - position, rank - above


def magnitude_of(upper: int, lower: int) -> float:
    """The magnitude with these halves."""
    return float(np.array([upper << _HALF | lower], np.uint32).view(np.float32)[0])


def _magnitude_bits(values: Tensor) -> np.ndarray:
    """Bit patterns without signs of float32 values on any device."""
    return (values.cpu().view(torch.int32) & torch.iinfo(torch.int32).max).numpy()
