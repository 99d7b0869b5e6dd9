"""Lossless coding of one tensor against another of the same dtype: differences in units in the last place (ULP).

The bit pattern of a floating-point number, its sign-magnitude turned to two's complement, is an integer whose order is
the order of the numbers. Reinforcement learning moves a weight by few places, so the difference of the two integers is
small and often 0. It wraps around, hence every pair of bit patterns (NaN payloads, infinities, -0, denormals) comes
back exactly.

Differences are kept in two layers: one of the changes above `DEFAULT_EPSILON`, one of the others. Each is a mask and
the differences that are not 0. So the overlap of agents is counted from masks alone, and a merge that ignores small
changes does not even read them. docs/FORMAT.md describes the bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import CorruptedFileError
from ..threads import Scratch
from . import kernels
from .defaults import DEFAULT_EPSILON
from .kernels import KERNEL_DTYPES
from .masks import bitmap_nbytes, count_ones, decode_mask, encode_mask, pack_bits, unpack_bits
from .zstd import compress, decompress


__all__ = [
    "DTYPE_OPTIONS",
    "TILE_NUMEL",
    "EncodedLayer",
    "EncodedTile",
    "Layer",
    "apply_layer",
    "apply_layers",
    "array_of",
    "codec_dtype",
    "encode_tile",
    "from_ordered",
    "is_finite",
    "is_mergeable",
    "to_ordered",
    "unpack_layers",
]

# A tile is coded on its own. 2**19 elements of 16 bits are 1 MiB: base, agents and result fit in a core's cache.
TILE_NUMEL = 2**19

# What an option that names a dtype can say; "auto" leaves it to the data.
DTYPE_OPTIONS = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_scratch = Scratch()

_INTEGER = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def codec_dtype(base: torch.dtype, agent: torch.dtype) -> torch.dtype | None:
    """Dtype in which both tensors are exact: their own if equal, else float32; `None` for other than these floats."""
    if base not in _INTEGER or agent not in _INTEGER:
        return None
    return base if base == agent else torch.float32


def is_mergeable(dtype: torch.dtype) -> bool:
    """Whether parameters of this dtype can be merged: bfloat16, float16, float32."""
    return dtype in _INTEGER


def array_of(values: Tensor) -> np.ndarray:
    """The bits of a CPU tensor as numpy integers, without a copy; numpy has no bfloat16."""
    return values.view(_INTEGER[values.dtype]).numpy()


def is_finite(values: Tensor) -> bool:
    """Whether a flat CPU tensor of one of these floats, not empty, holds neither NaN nor infinity."""
    bits = array_of(values)
    infinity = int(array_of(torch.full((1,), torch.inf, dtype=values.dtype))[0])
    sign = np.iinfo(bits.dtype).max + 1
    # as signed numbers the largest is a positive one, as unsigned ones a negative one
    unsigned = bits.view(f"u{bits.itemsize}")
    return bool(bits.max() < infinity and (unsigned.max() < infinity + sign))


def to_ordered(values: Tensor) -> Tensor:
    """Bit patterns as integers in the order of the numbers: int16 for 16-bit floats, int32 for float32."""
    bits = values.view(_INTEGER[values.dtype])
    return bits ^ ((bits >> (8 * bits.itemsize - 1)) & torch.iinfo(bits.dtype).max)


def from_ordered(ordered: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of [`to_ordered`]."""
    return (ordered ^ ((ordered >> (8 * ordered.itemsize - 1)) & torch.iinfo(ordered.dtype).max)).view(dtype)


@dataclass(frozen=True, slots=True)
class Layer:
    """Some of the differences of a tile.

    Args:
        bitmap (`np.ndarray`):
            Where they are, uint8.
        payload (`np.ndarray` or `bytes`):
            The differences there. 16 bits: one int8 each, 0 standing for the next of the int16 that follow. 32 bits:
            sign moved to the lowest bit, as four planes of bytes from the lowest to the highest.
    """

    bitmap: np.ndarray
    payload: np.ndarray | bytes


@dataclass(frozen=True, slots=True)
class EncodedLayer:
    """A layer's bytes on disk; both empty if it holds nothing."""

    mask: bytes
    codes: bytes

    def decode(self, numel: int, itemsize: int) -> Layer:
        """The layer of a tile of so many elements of so many bytes.

        Raises:
            CorruptedFileError: if these are not bytes of such a layer.
        """
        # at most a code and an escape for each of 16 bits, four planes for each of 32
        return Layer(decode_mask(self.mask, numel), decompress(self.codes, numel * (3 if itemsize == 2 else 4)))


@dataclass(frozen=True, slots=True)
class EncodedTile:
    """One tile of an agent.

    Args:
        large (`EncodedLayer`):
            Changes above `DEFAULT_EPSILON`.
        small (`EncodedLayer`):
            The other changes.
        changed (`int`):
            Number of elements that differ in any bit.
        is_finite (`bool`):
            Whether the agent holds neither NaN nor infinity.
    """

    large: EncodedLayer
    small: EncodedLayer
    changed: int
    is_finite: bool


def encode_tile(base: Tensor, agent: Tensor) -> EncodedTile:
    """Encode one tile.

    Args:
        base (`Tensor`):
            bfloat16, float16 or float32, flat, on the CPU.
        agent (`Tensor`):
            Of the same dtype and length.
    """
    split = _split_compiled if kernels.compiled and base.itemsize == 2 else _split
    layers, finite = split(base, agent)
    large, small = (
        EncodedLayer(encode_mask(layer.bitmap, base.numel(), ones), compress(layer.payload) if ones else b"")
        for layer, ones in layers
    )
    return EncodedTile(large, small, sum(ones for _, ones in layers), finite)


def apply_layer(values: Tensor, layer: Layer) -> None:
    """Add a layer's differences, in place: to the base's values one layer, to the result the other.

    Raises:
        CorruptedFileError: if the layer does not fit itself.
    """
    if kernels.compiled and values.itemsize == 2:
        try:
            kernels.compiled.apply(array_of(values), layer.bitmap, layer.payload)
        except ValueError as error:
            raise CorruptedFileError(f"a tile is damaged: {error}") from error
        return
    mask = torch.from_numpy(unpack_bits(layer.bitmap, values.numel()))
    unpack = _unpack_16 if values.itemsize == 2 else _unpack_32
    difference = torch.zeros_like(values, dtype=_INTEGER[values.dtype])
    difference[mask] = unpack(layer.payload, count_ones(layer.bitmap))
    values.copy_(from_ordered(to_ordered(values) + difference, values.dtype))


def apply_layers(base: Tensor, layers: Sequence[Layer], dtype: torch.dtype) -> Tensor:
    """A copy of the base's values, in `dtype`, with the differences of some layers."""
    values = base.to(dtype, copy=True)
    for layer in layers:
        apply_layer(values, layer)
    return values


def unpack_layers(
    base: Tensor, layers: Sequence[Layer], dtype: torch.dtype, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """What some layers make of the base.

    Args:
        base (`Tensor`):
            Parameters of the base model in their own dtype, flat, on the CPU.
        layers (`Sequence[Layer]`):
            One or two.
        dtype (`torch.dtype`):
            What their differences are in.
        scratch ([`~ram_trl.threads.Scratch`]):
            Memory for the result.

    Returns:
        `tuple[Tensor, Tensor]`: the agent's values, and their differences from the base: float32, flat, valid until
        this thread unpacks into the same memory again.

    Raises:
        CorruptedFileError: if a layer does not fit itself.
    """
    if not kernels.compiled or dtype.itemsize != 2:
        values = apply_layers(base, layers, dtype).float()
        return values, values - base.float()
    rooms = (scratch.take(4 * base.numel(), kind) for kind in ("values", "deltas"))
    values, deltas = (torch.from_numpy(room).view(torch.float32) for room in rooms)
    parts = [part for layer in layers for part in (layer.bitmap, layer.payload)]
    try:
        kernels.compiled.update(array_of(base), KERNEL_DTYPES[dtype], array_of(values), array_of(deltas), *parts)
    except ValueError as error:
        raise CorruptedFileError(f"a tile is damaged: {error}") from error
    return values, deltas


def _split(base: Tensor, agent: Tensor) -> tuple[list[tuple[Layer, int]], bool]:
    """The two layers and the number of elements of each; whether the agent is finite."""
    difference = to_ordered(agent) - to_ordered(base)
    large = (agent.float() - base.float()).abs() > DEFAULT_EPSILON
    pack = _pack_16 if difference.dtype == torch.int16 else _pack_32
    masks = (large, (difference != 0) & ~large)
    layers = [(Layer(pack_bits(mask.numpy()), pack(difference[mask])), int(mask.sum())) for mask in masks]
    return layers, is_finite(agent)


def _split_compiled(base: Tensor, agent: Tensor) -> tuple[list[tuple[Layer, int]], bool]:
    numel = base.numel()
    masks, codes, escapes = (
        tuple(_scratch.take(nbytes, (kind, layer)) for layer in range(2))
        for kind, nbytes in (("mask", bitmap_nbytes(numel)), ("codes", 3 * numel + 64), ("escapes", 2 * numel))
    )
    *counts, finite = kernels.compiled.encode(
        array_of(base), array_of(agent), KERNEL_DTYPES[base.dtype], DEFAULT_EPSILON, masks, codes, escapes
    )
    layers = []
    for mask, code, escape, (num_codes, num_escapes) in zip(masks, codes, escapes, counts, strict=True):
        end = num_codes + 2 * num_escapes
        code[num_codes:end] = escape[: 2 * num_escapes]
        layers.append((Layer(mask, code[:end]), num_codes))
    return layers, finite


def _pack_16(difference: Tensor) -> bytes:
    difference = difference.numpy()
    codes = difference.astype(np.int8)
    escaped = codes != difference
    codes[escaped] = 0
    return codes.tobytes() + difference[escaped].astype("<i2").tobytes()


def _unpack_16(payload: bytes, numel: int) -> Tensor:
    codes = np.frombuffer(payload, np.int8, count=min(numel, len(payload)))
    escaped = codes == 0
    num_escapes = np.count_nonzero(escaped)
    if len(payload) != numel + 2 * num_escapes:
        raise CorruptedFileError(f"a tile is damaged: {len(payload)} bytes are not {numel} codes and their escapes")
    difference = codes.astype(np.int16)
    difference[escaped] = np.frombuffer(payload, "<i2", offset=numel) if num_escapes else 0
    return torch.from_numpy(difference)


def _pack_32(difference: Tensor) -> bytes:
    zigzag = ((difference << 1) ^ (difference >> 31)).numpy().astype("<i4")
    return np.ascontiguousarray(zigzag.view(np.uint8).reshape(-1, 4).T).tobytes()


def _unpack_32(payload: bytes, numel: int) -> Tensor:
    if len(payload) != 4 * numel:
        raise CorruptedFileError(f"a tile is damaged: it holds {len(payload)} bytes, {4 * numel} were expected")
    planes = np.frombuffer(payload, np.uint8).reshape(4, numel)
    zigzag = torch.from_numpy(planes.T.copy().view("<i4").reshape(-1))
    return ((zigzag >> 1) & torch.iinfo(torch.int32).max) ^ -(zigzag & 1)
