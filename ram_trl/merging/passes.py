"""The two streaming passes over the model: probe counts, merge computes and writes.

Both walk over the tensors that a rank was given, one tile of the base and of each agent at a time.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..arithmetic.codec import codec_dtype
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
from ..storage.base_model import check_base_tensor
from ..storage.checkpoint import CheckpointWriter
from ..task_vector import TILE_NUMEL
from .plan import MergePlan


__all__ = ["merge_tensors", "probe_tensors"]


def probe_tensors(
    plan: MergePlan, names: Sequence[str], device: torch.device, advance: Callable[[int], None]
) -> OverlapCounts:
    """Count overlaps in some of the tensors (section 4.1), and check that the base is the recorded one.

    Args:
        plan ([`MergePlan`]):
            The merge.
        names (`Sequence[str]`):
            Tensors to count.
        device (`torch.device`):
            Device to compute on.
        advance (`Callable[[int], None]`):
            Called with the bytes of every tensor that is done.

    Raises:
        BaseModelError: if a tensor of the base is not what was recorded.
        NonFiniteError: if an agent holds NaN or infinity.
    """
    counts = OverlapCounts.zeros(len(plan.agents))
    for name in names:
        info = plan.base.tensors[name]
        check_base_tensor(plan.base, name, plan.records[name])
        if name in plan.touched_by:
            for _, base, updates in _tiles(plan, name, device):
                count_overlaps(updates, base.numel(), counts)
        elif codec_dtype(info.dtype, torch.float32) is not None:
            count_overlaps([], info.numel, counts)
        advance(info.nbytes)
    return counts


def merge_tensors(
    plan: MergePlan,
    names: Sequence[str],
    factors: Sequence[float],
    writer: CheckpointWriter,
    device: torch.device,
    advance: Callable[[int], None],
) -> dict[str, list[tuple[float, float]]]:
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
            Called with the bytes of every tensor that is done.

    Returns:
        `dict[str, list[tuple[float, float]]]`: for every changed tensor and agent, the magnitude of the agent's unique
        changes in the written model and in the agent; their ratio is the effective lambda.
    """
    magnitudes = {}
    for name in names:
        info = plan.base.tensors[name]
        if name in plan.touched_by:
            magnitudes[name] = _merge_tensor(plan, name, factors, writer, device)
        else:
            for start in range(0, info.numel, TILE_NUMEL):
                tile = plan.base.read(name, start, min(start + TILE_NUMEL, info.numel))
                for copy in plan.copies_of(name):
                    writer.write(copy.name, start, tile.to(copy.dtype))
        advance(info.nbytes)
    return magnitudes


def _merge_tensor(
    plan: MergePlan, name: str, factors: Sequence[float], writer: CheckpointWriter, device: torch.device
) -> list[tuple[float, float]]:
    settings, copies = plan.settings, plan.copies_of(name)
    written: list[list[float]] = [[] for _ in plan.agents]
    unique: list[list[float]] = [[] for _ in plan.agents]
    for start, base, updates in _tiles(plan, name, device):
        if not updates:
            merged = base
        elif settings.method == "average":
            merged = average_tile(base, updates, plan.weights)
        else:
            merged = selective_merge_tile(base, updates, factors, plan.weights)
        if settings.rounding == "stochastic":
            rounded = round_stochastic(merged, copies[0].dtype, seed=settings.seed, name=name, start=start)
        else:
            rounded = merged.to(copies[0].dtype)
        for update, (after, before) in zip(updates, unique_magnitudes(base, rounded, updates), strict=True):
            written[update.agent].append(after)
            unique[update.agent].append(before)
        rounded = rounded.cpu()
        for copy in copies:
            writer.write(copy.name, start, rounded)
    return [(math.fsum(after), math.fsum(before)) for after, before in zip(written, unique, strict=True)]


def _tiles(plan: MergePlan, name: str, device: torch.device) -> Iterator[tuple[int, Tensor, list[TileUpdate]]]:
    """Start, base in float32 and the agents' masked updates of every tile of a tensor."""
    numel = plan.base.tensors[name].numel
    for start in range(0, numel, TILE_NUMEL):
        base = plan.base.read(name, start, min(start + TILE_NUMEL, numel))
        updates = []
        for position in plan.touched_by[name]:
            update = plan.vectors[position].tile(position, name, start, base)
            if update is not None:
                update = TileUpdate(position, update.value.to(device), update.delta.to(device))
                updates.append(mask_inactive_(update, plan.settings.epsilon))
        yield start, base.to(device).float(), updates
