"""The two streaming passes over the model: probe counts, merge computes and writes.

A rank's tensors are cut into blocks. Every thread walks over a block at a time, one tile of the base and of each agent
in its hands, and does all of the work on it: reading, decoding, arithmetic, writing. So memory is bounded by threads
and agents, not by the model, and the disk is busy while others compute.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..arithmetic.codec import is_mergeable
from ..arithmetic.ram import (
    OverlapCounts,
    TileUpdate,
    average_tile,
    count_overlaps,
    mask_inactive_,
    selective_merge_tile,
    unique_magnitudes,
)
from ..arithmetic.rounding import round_stochastic
from ..errors import NonFiniteError
from ..storage.base_model import check_base_tensor
from ..storage.checkpoint import CheckpointWriter
from ..task_vector import TILE_NUMEL
from ..threads import in_threads
from .plan import MergePlan


__all__ = ["check_base", "merge_tensors", "probe_tensors"]

# Large enough that a thread is rarely without work, small enough that the largest tensor is shared by all.
_BLOCK_NUMEL = 16 * TILE_NUMEL

# For every agent the magnitude of its unique changes as written, and in the agent.
Magnitudes = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _Block:
    """Elements `start ... stop - 1` of a flattened tensor, and their bytes in the base."""

    name: str
    start: int
    stop: int
    nbytes: int


def check_base(plan: MergePlan, names: Sequence[str], advance: Callable[[int], None]) -> None:
    """Compare some of the base's tensors with their recorded digests.

    Args:
        plan ([`MergePlan`]):
            The merge.
        names (`Sequence[str]`):
            Tensors to check, each with those that are tied to it.
        advance (`Callable[[int], None]`):
            Called with the bytes of every tensor that is done.

    Raises:
        BaseModelError: naming a tensor that is not what was recorded.
    """

    def check(name: str) -> None:
        for copy in plan.copies_of[name]:
            check_base_tensor(plan.base, copy.name, plan.records[copy.name])

    for name, _ in in_threads(check, names):
        advance(plan.base.tensors[name].nbytes)


def probe_tensors(
    plan: MergePlan, names: Sequence[str], device: torch.device, advance: Callable[[int], None]
) -> OverlapCounts:
    """Count overlaps in some of the tensors (section 4.1).

    Args:
        plan ([`MergePlan`]):
            The merge.
        names (`Sequence[str]`):
            Tensors to count.
        device (`torch.device`):
            Device to compute on.
        advance (`Callable[[int], None]`):
            Called with the bytes of every block that is done.

    Raises:
        NonFiniteError: if an agent holds NaN or infinity.
    """

    def count(block: _Block) -> OverlapCounts:
        counts = OverlapCounts.zeros(len(plan.agents))
        if block.name in plan.touched_by:
            for _, base, updates in _tiles(plan, block, plan.settings.epsilon, device):
                count_overlaps(updates, base.numel(), counts)
        elif is_mergeable(plan.base.tensors[block.name].dtype):
            count_overlaps([], block.stop - block.start, counts)
        return counts

    total = OverlapCounts.zeros(len(plan.agents))
    for block, counts in in_threads(count, _blocks(plan, names)):
        total.add(counts)
        advance(block.nbytes)
    return total


def merge_tensors(
    plan: MergePlan,
    names: Sequence[str],
    factors: Sequence[float],
    writer: CheckpointWriter,
    device: torch.device,
    advance: Callable[[int], None],
) -> dict[str, Magnitudes]:
    """Merge some of the tensors (section 4.3) and write them.

    Args:
        plan ([`MergePlan`]):
            The merge.
        names (`Sequence[str]`):
            Tensors to merge.
        factors (`Sequence[float]`):
            Rescale factor lambda of every agent.
        writer ([`~ram_trl.storage.checkpoint.CheckpointWriter`]):
            Where to write.
        device (`torch.device`):
            Device to compute on.
        advance (`Callable[[int], None]`):
            Called with the bytes of every block that is done.

    Returns:
        `dict[str, list[tuple[float, float]]]`: for every changed tensor and agent, the magnitude of the agent's unique
        changes in the written model and in the agent; their ratio is the effective lambda.
    """

    def merge(block: _Block) -> Magnitudes:
        if block.name in plan.touched_by:
            return _merge_block(plan, block, factors, writer, device)
        for start, stop in _tile_bounds(block):
            tile = plan.base.read(block.name, start, stop)
            for copy in plan.copies_of[block.name]:
                writer.write(copy.name, start, _in_range(block.name, tile, tile.to(copy.dtype)))
        return []

    parts: dict[str, list[Magnitudes]] = {}
    for block, magnitudes in in_threads(merge, _blocks(plan, names)):
        if magnitudes:
            parts.setdefault(block.name, []).append(magnitudes)
        advance(block.nbytes)
    return {name: _add_magnitudes(blocks) for name, blocks in parts.items()}


def _merge_block(
    plan: MergePlan, block: _Block, factors: Sequence[float], writer: CheckpointWriter, device: torch.device
) -> Magnitudes:
    settings, copies = plan.settings, plan.copies_of[block.name]
    # a plain average knows no masks
    epsilon = 0.0 if settings.method == "average" else settings.epsilon
    tiles = []
    for start, base, updates in _tiles(plan, block, epsilon, device):
        if not updates:
            merged = base
        elif settings.method == "average":
            merged = average_tile(base, updates, plan.weights)
        else:
            merged = selective_merge_tile(base, updates, factors, plan.weights)
        if settings.rounding == "stochastic":
            rounded = round_stochastic(merged, copies[0].dtype, seed=settings.seed, name=block.name, start=start)
        else:
            rounded = merged.to(copies[0].dtype)
        magnitudes = [(0.0, 0.0)] * len(plan.agents)
        for update, pair in zip(updates, unique_magnitudes(base, rounded, updates), strict=True):
            magnitudes[update.agent] = pair
        tiles.append(magnitudes)
        rounded = _in_range(block.name, merged, rounded).cpu()
        for copy in copies:
            writer.write(copy.name, start, rounded)
    return _add_magnitudes(tiles)


def _in_range(name: str, exact: Tensor, rounded: Tensor) -> Tensor:
    """Refuse to write NaN and infinity."""
    if rounded.is_floating_point() and rounded.itemsize > 1 and not rounded.abs().amax().isfinite():
        if exact.abs().amax().isfinite():
            raise NonFiniteError(
                f"merged tensor {name!r} has values beyond {rounded.dtype}: choose --output_dtype float32"
            )
        raise NonFiniteError(f"merged tensor {name!r} has NaN or infinity: look at the base, and at weights and r")
    return rounded


def _add_magnitudes(parts: list[Magnitudes]) -> Magnitudes:
    """Sums over tiles or blocks, exact, so that their order does not matter."""
    return [
        (math.fsum(after for after, _ in pairs), math.fsum(before for _, before in pairs))
        for pairs in zip(*parts, strict=True)
    ]


def _tiles(
    plan: MergePlan, block: _Block, epsilon: float, device: torch.device
) -> Iterator[tuple[int, Tensor, list[TileUpdate]]]:
    """Start, base in float32 and the agents' masked updates of every tile of a block."""
    for start, stop in _tile_bounds(block):
        base = plan.base.read(block.name, start, stop)
        updates = []
        for position in plan.touched_by[block.name]:
            update = plan.vectors[position].tile(position, block.name, start, base)
            if update is not None:
                update = TileUpdate(position, update.value.to(device), update.delta.to(device))
                updates.append(mask_inactive_(update, epsilon))
        yield start, base.to(device).float(), updates


def _tile_bounds(block: _Block) -> Iterator[tuple[int, int]]:
    for start in range(block.start, block.stop, TILE_NUMEL):
        yield start, min(start + TILE_NUMEL, block.stop)


def _blocks(plan: MergePlan, names: Sequence[str]) -> list[_Block]:
    blocks = []
    for name in names:
        info = plan.base.tensors[name]
        for start in range(0, info.numel, _BLOCK_NUMEL):
            stop = min(start + _BLOCK_NUMEL, info.numel)
            blocks.append(_Block(name, start, stop, (stop - start) * info.dtype.itemsize))
    return blocks
