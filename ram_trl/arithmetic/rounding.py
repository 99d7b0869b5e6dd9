"""Rounding float32 to the output's dtype, to nearest or stochastically.

Stochastic rounding keeps small rescaled updates that rounding to nearest swallows, on average. Its randomness is a
function of (seed, tensor name, element index) alone, so that the result does not depend on tiles, devices or
processes.
"""

import hashlib

import torch
from torch import Tensor

from . import kernels
from .codec import array_of, from_ordered, to_ordered
from .select import select


__all__ = ["round_stochastic", "stream_state", "uniform"]

# SplitMix64 (Steele, Lea and Flood 2014): increment and the two multipliers of its finaliser, as signed 64-bit.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def round_stochastic(tile: Tensor, dtype: torch.dtype, *, seed: int, name: str, start: int) -> Tensor:
    """Round each element to one of its two neighbours in `dtype`, with probability proportional to nearness.

    Args:
        tile (`Tensor`):
            Finite float32 values, flat.
        dtype (`torch.dtype`):
            `torch.bfloat16` or `torch.float16`; with `torch.float32` the tile is returned as it is.
        seed (`int`):
            Seed of the merge.
        name (`str`):
            Name of the tensor that the tile belongs to.
        start (`int`):
            Index of the tile's first element in the flattened tensor.

    Returns:
        `Tensor`: of `dtype`, flat. An element that `dtype` holds exactly is never changed.
    """
    if dtype == torch.float32:
        return tile
    nearest = tile.to(dtype)
    error = tile - nearest.float()
    ordered = to_ordered(nearest)
    neighbour = from_ordered(torch.where(error > 0, ordered + 1, ordered - 1), dtype)
    # Beyond the largest finite number there is no neighbour to choose.
    usable = (error != 0) & neighbour.isfinite() & nearest.isfinite()
    probability = error.abs() / (neighbour.float() - nearest.float()).abs()
    chosen = usable & (uniform(tile.numel(), seed=seed, name=name, start=start, device=tile.device) < probability)
    return select(chosen, neighbour, nearest)


def uniform(numel: int, *, seed: int, name: str, start: int, device: torch.device) -> Tensor:
    """Numbers in [0, 1), float32, flat: SplitMix64 at the counters `start ... start + numel - 1` of a named stream."""
    first = stream_state(seed=seed, name=name, start=start)
    if kernels.compiled and device.type == "cpu":
        drawn = torch.empty(numel)
        kernels.compiled.uniform(array_of(drawn), first)
        return drawn
    # in place: fresh memory takes longer to get than to fill
    state = torch.arange(numel, dtype=torch.int64, device=device).mul_(_GAMMA).add_(first)
    state.bitwise_xor_(_shift_right(state, 30)).mul_(_MIX_1)
    state.bitwise_xor_(_shift_right(state, 27)).mul_(_MIX_2)
    state.bitwise_xor_(_shift_right(state, 31))
    return _shift_right(state, 40).to(torch.float32).mul_(2.0**-24)


def stream_state(*, seed: int, name: str, start: int) -> int:
    """State of a named stream at a counter, as a signed 64-bit integer."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    state = int.from_bytes(digest, "little") + start * _GAMMA
    return (state + 2**63) % 2**64 - 2**63


def _shift_right(bits: Tensor, places: int) -> Tensor:
    """Shift int64 as if it were unsigned."""
    return (bits >> places).bitwise_and_((1 << (64 - places)) - 1)
