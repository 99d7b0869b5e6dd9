"""Lossless coding of one tensor against another of the same dtype: differences in units in the last place (ULP).

The bit pattern of a floating-point number, its sign-magnitude turned to two's complement, is an integer whose order is
the order of the numbers. Reinforcement learning moves a weight by few places, so the difference of the two integers is
small, mostly 0, and compresses well. It wraps around, hence every pair of bit patterns (NaN payloads, infinities, -0,
denormals) comes back exactly. docs/FORMAT.md describes the bytes.
"""

import numpy as np
import torch
import zstandard
from torch import Tensor

from ..errors import CorruptedFileError


__all__ = [
    "DTYPE_OPTIONS",
    "FRAME_NUMEL",
    "codec_dtype",
    "decode_frame",
    "encode_frame",
    "from_ordered",
    "is_mergeable",
    "num_frames",
    "to_ordered",
]

# A frame decodes on its own. 2**18 elements keep a tile of float32 at 1 MiB, within a core's cache.
FRAME_NUMEL = 2**18

# What an option that names a dtype can say; "auto" leaves it to the data.
DTYPE_OPTIONS = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_LEVEL = 1
_ESCAPE = -128
_INTEGER = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def codec_dtype(base: torch.dtype, agent: torch.dtype) -> torch.dtype | None:
    """Dtype in which both tensors are exact: their own if equal, else float32; `None` for other than these floats."""
    if base not in _INTEGER or agent not in _INTEGER:
        return None
    return base if base == agent else torch.float32


def is_mergeable(dtype: torch.dtype) -> bool:
    """Whether parameters of this dtype can be merged: bfloat16, float16, float32."""
    return dtype in _INTEGER


def num_frames(numel: int) -> int:
    return -(-numel // FRAME_NUMEL)


def to_ordered(values: Tensor) -> Tensor:
    """Bit patterns as integers in the order of the numbers: int16 for 16-bit floats, int32 for float32."""
    bits = values.view(_INTEGER[values.dtype])
    return bits ^ ((bits >> (8 * bits.itemsize - 1)) & torch.iinfo(bits.dtype).max)


def from_ordered(ordered: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of [`to_ordered`]."""
    return (ordered ^ ((ordered >> (8 * ordered.itemsize - 1)) & torch.iinfo(ordered.dtype).max)).view(dtype)


def encode_frame(base: Tensor, agent: Tensor) -> bytes:
    """Encode at most `FRAME_NUMEL` elements.

    Args:
        base (`Tensor`):
            bfloat16, float16 or float32, flat, on the CPU.
        agent (`Tensor`):
            Of the same dtype and length.

    Returns:
        `bytes`: one zstd frame; empty if no bit differs.
    """
    difference = to_ordered(agent) - to_ordered(base)
    if not difference.any():
        return b""
    payload = _pack_16(difference) if difference.dtype == torch.int16 else _pack_32(difference)
    return zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True).compress(payload)


def decode_frame(frame: bytes, base: Tensor) -> Tensor:
    """Decode a frame that is not empty.

    Args:
        frame (`bytes`):
            What [`encode_frame`] returned.
        base (`Tensor`):
            The same base as then.

    Returns:
        `Tensor`: the agent's elements, of the base's dtype.

    Raises:
        CorruptedFileError: if the bytes are not a frame for so many elements.
    """
    limit = base.numel() * 4
    try:
        parameters = zstandard.get_frame_parameters(frame)
        if parameters.content_size > limit:
            raise CorruptedFileError(f"a frame claims {parameters.content_size} bytes, at most {limit} are possible")
        payload = zstandard.ZstdDecompressor().decompress(frame, max_output_size=limit)
    except zstandard.ZstdError as error:
        raise CorruptedFileError(f"a frame does not decompress: {error}") from error
    unpack = _unpack_16 if base.itemsize == 2 else _unpack_32
    return from_ordered(to_ordered(base) + unpack(payload, base.numel()), base.dtype)


def _pack_16(difference: Tensor) -> bytes:
    """int16 differences as one int8 each, -128 standing for the next of the int16 escapes that follow."""
    escaped = difference.abs() > 127
    # abs of the most negative int16 is itself, hence negative
    escaped |= difference == torch.iinfo(torch.int16).min
    codes = difference.to(torch.int8).masked_fill_(escaped, _ESCAPE)
    return codes.numpy().tobytes() + difference[escaped].numpy().astype("<i2").tobytes()


def _unpack_16(payload: bytes, numel: int) -> Tensor:
    codes = np.frombuffer(payload, np.int8, count=min(numel, len(payload)))
    escapes = np.frombuffer(payload[numel:], "<i2") if (len(payload) - numel) % 2 == 0 else None
    escaped = codes == _ESCAPE
    if len(codes) != numel or escapes is None or np.count_nonzero(escaped) != len(escapes):
        raise CorruptedFileError(f"a frame holds {len(payload)} bytes, which is not {numel} codes and their escapes")
    difference = codes.astype(np.int16)
    difference[escaped] = escapes
    return torch.from_numpy(difference)


def _pack_32(difference: Tensor) -> bytes:
    """int32 differences, sign moved to the lowest bit, as four planes of bytes from the lowest to the highest."""
    zigzag = ((difference << 1) ^ (difference >> 31)).numpy().astype("<i4")
    return np.ascontiguousarray(zigzag.view(np.uint8).reshape(-1, 4).T).tobytes()


def _unpack_32(payload: bytes, numel: int) -> Tensor:
    if len(payload) != 4 * numel:
        raise CorruptedFileError(f"a frame holds {len(payload)} bytes, {4 * numel} were expected")
    planes = np.frombuffer(payload, np.uint8).reshape(4, numel)
    zigzag = torch.from_numpy(planes.T.copy().view("<i4").reshape(-1))
    return ((zigzag >> 1) & torch.iinfo(torch.int32).max) ^ -(zigzag & 1)
