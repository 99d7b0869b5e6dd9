"""The merge of one tile, from the agents' changes to rounded values, in one of two ways: torch or the compiled loops.

Torch is the definition (`methods/`, `ram.py`, `rounding.py`) and runs on any device; for RAM's methods, and for those
that add up the changes, the compiled loops give the same bits in one pass over the tile.
"""

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from ..errors import CorruptedFileError
from ..threads import Scratch
from . import kernels
from .codec import Layer, array_of, is_finite, unpack_layers
from .kernels import KERNEL_DTYPES
from .methods import METHODS
from .methods.method import TileContext
from .ram import TileUpdate, mask_inactive_, set_mask, unique_magnitudes
from .rounding import round_stochastic, stream_state


__all__ = [
    "ENGINES",
    "Finiteness",
    "MergedTile",
    "PackedUpdate",
    "TileMerge",
    "merge_tile_compiled",
    "merge_tile_eager",
    "round_tile",
]

ENGINES = ("auto", "compiled", "eager")

# Elements that torch merges at a time on a CPU: what is between two operations stays in a core's cache.
_PIECE_NUMEL = 2**16


@dataclass(frozen=True, slots=True)
class PackedUpdate:
    """What one agent makes of one tile, as differences from a base of 16-bit floats that were not yet applied.

    Args:
        agent (`int`):
            Position of the agent in the merge.
        layers (`Sequence` of [`~ram_trl.arithmetic.codec.Layer`]):
            One or two, with every change that the merge looks at.
    """

    agent: int
    layers: Sequence[Layer]


@dataclass(frozen=True, kw_only=True, slots=True)
class TileMerge:
    """How tiles are merged.

    Args:
        method (`str`):
            One of [`~ram_trl.arithmetic.methods.METHODS`].
        epsilon (`float`):
            Threshold of equation 1.
        factors (`Sequence[float]`):
            Rescale factor lambda of every agent; 1 unless the method is one of RAM's.
        weights (`Sequence[float]`):
            Weight w of every agent, positive.
        rounding (`str`):
            `"nearest"` or `"stochastic"`.
        seed (`int`):
            Seed of stochastic rounding, and of a method's own randomness.
        device (`torch.device`):
            Where torch computes.
        agents (`Sequence[str]`, *optional*):
            Names and versions of the agents.
        options (`Mapping[str, float]`, *optional*):
            Every option of the method.
        thresholds (`Mapping[str, Sequence[float]]`, *optional*):
            For every tensor the smallest magnitude that is kept of each agent, of a method that trims.
    """

    method: str
    epsilon: float
    factors: Sequence[float]
    weights: Sequence[float]
    rounding: str
    seed: int
    device: torch.device
    agents: Sequence[str] = ()
    options: Mapping[str, float] = field(default_factory=dict)
    thresholds: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def ignored(self) -> float:
        """Size up to which changes make no difference to the result."""
        return self.epsilon if METHODS[self.method].is_masked else 0.0

    def context(self, name: str, start: int, fishers: Sequence[Tensor] = ()) -> TileContext:
        """What the method may know of a tile."""
        return TileContext(
            name=name,
            start=start,
            agents=self.agents,
            weights=self.weights,
            factors=self.factors,
            options=self.options,
            thresholds=self.thresholds.get(name, ()),
            fishers=[_on_device(fisher, self.device) for fisher in fishers],
            seed=self.seed,
        )


class Finiteness(Enum):
    """Whether merged values are finite; if not, whether they were before they were rounded."""

    FINITE = 0
    TOO_LARGE = 1
    NOT_FINITE = 2


@dataclass(frozen=True, slots=True)
class MergedTile:
    """What came out besides the values.

    Args:
        finiteness ([`Finiteness`]):
            Of the values.
        diverged (`list[int]`):
            Positions of agents that are not finite here.
        magnitudes (`list[tuple[float, float]]`):
            For every update what [`~ram_trl.arithmetic.ram.unique_magnitudes`] gives.
    """

    finiteness: Finiteness
    diverged: list[int]
    magnitudes: list[tuple[float, float]]


def merge_tile_eager(
    base: Tensor,
    updates: Sequence[TileUpdate],
    merge: TileMerge,
    name: str,
    start: int,
    out: Tensor,
    merged_delta: Tensor | None = None,
    fishers: Sequence[Tensor] = (),
) -> MergedTile:
    """Merge one tile with torch.

    Args:
        base (`Tensor`):
            Parameters of the base model in their own dtype, flat, on the CPU.
        updates (`Sequence[TileUpdate]`):
            The agents that touch this tile, on the CPU, without masks; at least one unless `merged_delta` is given.
        merge ([`TileMerge`]):
            How to merge.
        name (`str`):
            Name of the tensor.
        start (`int`):
            Index of the tile's first element in the flattened tensor.
        out (`Tensor`):
            Where the merged parameters go: in the output's dtype, flat, on the CPU.
        merged_delta (`Tensor`, *optional*):
            What the method made of the whole matrix, here: float32, flat, on the CPU.
        fishers (`Sequence[Tensor]`, *optional*):
            Fisher information of every agent, for a method that needs it: float32, flat, on the CPU.
    """
    diverged = [update.agent for update in updates if not is_finite(update.delta)]
    numel, parts = base.numel(), []
    step = numel if merge.device.type == "cuda" else _PIECE_NUMEL
    with _own_stream(merge.device):
        for at in range(0, numel, step):
            piece = slice(at, min(at + step, numel))
            parts.append(
                _merge_eager(
                    base[piece],
                    [TileUpdate(update.agent, update.value[piece], update.delta[piece]) for update in updates],
                    merge,
                    merge.context(name, start + at, [fisher[piece] for fisher in fishers]),
                    out[piece],
                    None if merged_delta is None else merged_delta[piece],
                )
            )
    worst = max((finiteness for finiteness, _ in parts), key=lambda finiteness: finiteness.value)
    magnitudes = [
        (math.fsum(after for after, _ in own), math.fsum(before for _, before in own))
        for own in zip(*(magnitudes for _, magnitudes in parts), strict=True)
    ]
    return MergedTile(worst, diverged, magnitudes)


def round_tile(base: Tensor, merge: TileMerge, name: str, start: int, out: Tensor) -> Finiteness:
    """A tile that no agent changed, in the output's dtype. Arguments as [`merge_tile_eager`]."""
    out.copy_(_rounded(base, merge, name, start, out.dtype))
    return _finiteness(base, out)


def merge_tile_compiled(
    base: Tensor, updates: Sequence[TileUpdate | PackedUpdate], merge: TileMerge, name: str, start: int, out: Tensor
) -> MergedTile:
    """Merge one tile with the compiled loops. Arguments as [`merge_tile_eager`]; for methods that have them.

    Raises:
        CorruptedFileError: if a packed update does not fit itself.
    """
    coefficients, agents = METHODS[merge.method].coefficients, []
    is_sum = coefficients is not None
    weights = coefficients(merge.context(name, start)) if is_sum else merge.weights
    for update in updates:
        weight = weights[update.agent]
        gain = 0.0 if is_sum else weight * merge.factors[update.agent] - 1.0
        if isinstance(update, PackedUpdate):
            parts = [part for layer in update.layers for part in (layer.bitmap, layer.payload)]
            agents.append((True, *parts[:2], gain, weight, *parts[2:]))
        else:
            agents.append((False, array_of(update.value), array_of(update.delta), gain, weight))
    key = stream_state(seed=merge.seed, name=name, start=start) if merge.rounding == "stochastic" else None
    dtypes = KERNEL_DTYPES[out.dtype], KERNEL_DTYPES[base.dtype]
    try:
        finiteness, are_agents_finite, magnitudes = kernels.compiled.merge(
            array_of(out), dtypes[0], array_of(base), dtypes[1], agents, merge.epsilon, key, is_sum
        )
    except ValueError as error:
        raise CorruptedFileError(f"a tile is damaged: {error}") from error
    diverged = [] if are_agents_finite else [update.agent for update in updates if not _is_update_finite(update, base)]
    return MergedTile(Finiteness(finiteness), diverged, magnitudes)


def _is_update_finite(update: TileUpdate | PackedUpdate, base: Tensor) -> bool:
    if isinstance(update, TileUpdate):
        return is_finite(update.delta)
    return is_finite(unpack_layers(base, update.layers, base.dtype, Scratch())[1])


def _merge_eager(
    base: Tensor,
    updates: Sequence[TileUpdate],
    merge: TileMerge,
    context: TileContext,
    out: Tensor,
    merged_delta: Tensor | None,
) -> tuple[Finiteness, list[tuple[float, float]]]:
    method, exact_base = METHODS[merge.method], _on_device(base, merge.device).float()
    mask = mask_inactive_ if method.is_masked else set_mask
    updates = [
        mask(
            TileUpdate(update.agent, _on_device(update.value, merge.device), _on_device(update.delta, merge.device)),
            merge.epsilon,
        )
        for update in updates
    ]
    if merged_delta is None:
        merged = method.merge_tile(exact_base, updates, context)
    else:
        merged = exact_base + _on_device(merged_delta, merge.device)
    rounded = _rounded(merged, merge, context.name, context.start, out.dtype)
    out.copy_(rounded)
    return _finiteness(merged, out), unique_magnitudes(exact_base, rounded, updates) if updates else []


def _rounded(values: Tensor, merge: TileMerge, name: str, start: int, dtype: torch.dtype) -> Tensor:
    if merge.rounding == "stochastic":
        return round_stochastic(values.float(), dtype, seed=merge.seed, name=name, start=start)
    return values.to(dtype)


def _finiteness(exact: Tensor, rounded: Tensor) -> Finiteness:
    if is_finite(rounded):
        return Finiteness.FINITE
    return Finiteness.TOO_LARGE if is_finite(exact.cpu()) else Finiteness.NOT_FINITE


class _Streams(threading.local):
    stream: torch.cuda.Stream | None = None


_streams = _Streams()


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """On a GPU, a stream for each thread: while one computes, another's tiles travel."""
    if device.type != "cuda":
        yield
        return
    if _streams.stream is None:
        _streams.stream = torch.cuda.Stream(device)
    with torch.cuda.stream(_streams.stream):
        yield


def _on_device(values: Tensor, device: torch.device) -> Tensor:
    # only from pinned memory does a copy not wait for the device
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
