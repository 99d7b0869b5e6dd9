"""Which elements changed: bitmaps, and their bytes on disk.

Bit `i % 8` (from the lowest) of byte `i // 8` belongs to element i. On disk a bitmap is that, or the gaps between its
ones where they are rare, compressed where that helps. docs/FORMAT.md describes the bytes.
"""

import numpy as np

from ..errors import CorruptedFileError
from . import kernels
from .zstd import compress, decompress


__all__ = ["bitmap_nbytes", "count_ones", "decode_mask", "encode_mask", "pack_bits", "unpack_bits"]

_RAW, _BITMAP, _GAPS = range(3)
# A gap of so many zeros, or more, goes on in the next byte.
_LONG_GAP = 255
# Below this density gaps are smaller than a compressed bitmap, and faster to decode.
_SPARSE = 1 / 6
# Between these little can be gained: the entropy is above 0.97 bits an element.
_BALANCED = (0.4, 0.6)


def bitmap_nbytes(numel: int) -> int:
    return -(-numel // 8)


def pack_bits(mask: np.ndarray) -> np.ndarray:
    """bool, flat -> bitmap, uint8."""
    return np.packbits(mask, bitorder="little")


def unpack_bits(bitmap: np.ndarray, numel: int) -> np.ndarray:
    """Inverse of [`pack_bits`]."""
    return np.unpackbits(bitmap, count=numel, bitorder="little").view(np.bool_)


def count_ones(bitmap: np.ndarray) -> int:
    return int(np.bitwise_count(bitmap).sum())


def encode_mask(bitmap: np.ndarray, numel: int, ones: int) -> bytes:
    """The bytes of a bitmap on disk.

    Args:
        bitmap (`np.ndarray`):
            uint8.
        numel (`int`):
            Number of elements.
        ones (`int`):
            Number of ones among them.

    Returns:
        `bytes`: empty without ones.
    """
    if ones == 0:
        return b""
    density = ones / numel
    if density < _SPARSE:
        return bytes([_GAPS]) + compress(_pack_gaps(bitmap, ones))
    if not _BALANCED[0] <= density <= _BALANCED[1]:
        compressed = compress(bitmap)
        if len(compressed) < len(bitmap):
            return bytes([_BITMAP]) + compressed
    return bytes([_RAW]) + bitmap.tobytes()


def decode_mask(data: memoryview, numel: int) -> np.ndarray:
    """Inverse of [`encode_mask`], for bytes that are not empty.

    Returns:
        `np.ndarray`: bitmap, uint8.

    Raises:
        CorruptedFileError: if the bytes are not a mask of so many elements.
    """
    nbytes, kind = bitmap_nbytes(numel), data[0]
    if kind == _RAW:
        bitmap = np.frombuffer(data[1:], np.uint8)
    elif kind == _BITMAP:
        bitmap = np.frombuffer(decompress(data[1:], nbytes), np.uint8)
    elif kind == _GAPS:
        bitmap = _unpack_gaps(decompress(data[1:], numel + numel // _LONG_GAP + 1), nbytes)
    else:
        raise CorruptedFileError(f"a mask is of kind {kind}, which is not known")
    if len(bitmap) != nbytes or (numel % 8 and bitmap[-1] >> numel % 8):
        raise CorruptedFileError(f"a mask does not have {numel} elements")
    return bitmap


def _pack_gaps(bitmap: np.ndarray, ones: int) -> np.ndarray:
    """For every one the number of zeros before it, in bytes; 255 is that many zeros without a one."""
    if kernels.compiled:
        gaps = np.empty(ones + 8 * len(bitmap) // _LONG_GAP + 1, np.uint8)
        return gaps[: kernels.compiled.pack_gaps(bitmap, gaps)]
    positions = np.flatnonzero(np.unpackbits(bitmap, bitorder="little"))
    long_gaps, rest = np.divmod(np.diff(positions, prepend=-1) - 1, _LONG_GAP)
    ends = np.cumsum(long_gaps + 1)
    gaps = np.full(ends[-1], _LONG_GAP, np.uint8)
    gaps[ends - 1] = rest
    return gaps


def _unpack_gaps(data: bytes, nbytes: int) -> np.ndarray:
    if kernels.compiled:
        bitmap = np.empty(nbytes, np.uint8)
        try:
            kernels.compiled.unpack_gaps(data, bitmap)
        except ValueError as error:
            raise CorruptedFileError("a mask has gaps beyond its end") from error
        return bitmap
    gaps = np.frombuffer(data, np.uint8)
    is_one = gaps != _LONG_GAP
    positions = np.cumsum(gaps.astype(np.int64) + is_one)[is_one] - 1
    if len(positions) and positions[-1] >= 8 * nbytes:
        raise CorruptedFileError("a mask has gaps beyond its end")
    mask = np.zeros(8 * nbytes, np.bool_)
    mask[positions] = True
    return pack_bits(mask)
