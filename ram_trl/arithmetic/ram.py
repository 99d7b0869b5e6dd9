"""Reinforced Agent Merging: masks, overlap counts, rescale factors, selective merge.

Paper: [Behavior Knowledge Merge in Reinforced Agentic Models](https://huggingface.co/papers/2601.13572). The functions
work on tiles: flat pieces of a tensor, the same piece of every agent. Counts add up over tiles, tensors and processes
as integers, so the factors do not depend on how the work was cut.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from . import kernels
from .codec import array_of
from .masks import unpack_bits
from .select import keep, select


__all__ = [
    "OverlapCounts",
    "TileUpdate",
    "count_overlaps",
    "mask_inactive_",
    "overlap_counts",
    "overlap_ratio",
    "rescale_factor",
    "selective_merge_tile",
    "set_mask",
    "unique_magnitudes",
]


@dataclass(slots=True)
class TileUpdate:
    """What one agent makes of one tile of the model.

    Args:
        agent (`int`):
            Position of the agent in the merge.
        value (`Tensor`):
            The agent's parameters, float32, flat.
        delta (`Tensor`):
            The agent's parameters minus the base's, float32, flat.
        active (`Tensor`, *optional*):
            Mask m_t of equation 1, bool, flat; set by [`set_mask`].
    """

    agent: int
    value: Tensor
    delta: Tensor
    active: Tensor | None = None


@dataclass(slots=True)
class OverlapCounts:
    """Overlap statistics of the agents over the whole model (section 4.1), all in elements.

    Args:
        changed (`list[int]`):
            For each agent the number of active elements.
        unique (`list[int]`):
            For each agent the number of active elements that no other agent changed (c = 1).
        histogram (`list[int]`):
            `histogram[k]` is the number of elements that exactly k agents changed, for k = 0 ... N.
    """

    changed: list[int]
    unique: list[int]
    histogram: list[int]

    @classmethod
    def zeros(cls, num_agents: int) -> "OverlapCounts":
        return cls([0] * num_agents, [0] * num_agents, [0] * (num_agents + 1))

    @property
    def shared(self) -> list[int]:
        """For each agent the number of active elements that at least one other agent changed (c >= 2)."""
        return [changed - unique for changed, unique in zip(self.changed, self.unique, strict=True)]

    @property
    def total(self) -> int:
        return sum(self.histogram)

    def to_list(self) -> list[int]:
        """The counts as one list of integers, for a sum over processes."""
        return [*self.changed, *self.unique, *self.histogram]

    def add(self, other: "OverlapCounts") -> None:
        """Add the counts of another part of the model."""
        for own, others in zip(
            (self.changed, self.unique, self.histogram), (other.changed, other.unique, other.histogram), strict=True
        ):
            own[:] = [a + b for a, b in zip(own, others, strict=True)]

    @classmethod
    def from_list(cls, counts: Sequence[int], num_agents: int) -> "OverlapCounts":
        counts = list(counts)
        return cls(counts[:num_agents], counts[num_agents : 2 * num_agents], counts[2 * num_agents :])


def set_mask(update: TileUpdate, epsilon: float) -> TileUpdate:
    """Set the mask of equation 1, `|delta| > epsilon` (strictly)."""
    update.active = update.delta.abs() > epsilon
    return update


def mask_inactive_(update: TileUpdate, epsilon: float) -> TileUpdate:
    """Set the mask of equation 1, and zero the deltas outside it, in place."""
    set_mask(update, epsilon)
    update.delta.copy_(keep(update.active, update.delta))
    return update


def count_overlaps(masks: Mapping[int, np.ndarray], numel: int, counts: OverlapCounts) -> None:
    """Add one tile to the counts.

    Args:
        masks (`Mapping[int, np.ndarray]`):
            Bitmaps of the masks of equation 1 ([`~ram_trl.arithmetic.masks`]), by the position of the agent. An agent
            that is not here changed nothing in the tile.
        numel (`int`):
            Number of elements of the tile.
        counts ([`OverlapCounts`]):
            Counts to add to, in place.
    """
    if not masks:
        counts.histogram[0] += numel
        return
    count = kernels.compiled.count if kernels.compiled else _count
    tile = OverlapCounts.from_list(count(list(masks.values())), len(masks))
    for position, changed, unique in zip(masks, tile.changed, tile.unique, strict=True):
        counts.changed[position] += changed
        counts.unique[position] += unique
    for overlap, number in enumerate(tile.histogram):
        counts.histogram[overlap] += number
    counts.histogram[0] += numel - tile.total


def overlap_counts(updates: Sequence[TileUpdate]) -> Tensor:
    """Overlap count c of every element of a tile, from the masks of at least one agent: int16, flat."""
    overlap = updates[0].active.to(torch.int16)
    for update in updates[1:]:
        overlap.add_(update.active)
    return overlap


def overlap_ratio(shared: int, unique: int) -> float:
    """Overlap-unique ratio rho (equation 2): shared / unique; infinite without unique elements, 0 without any."""
    if unique == 0:
        return math.inf if shared else 0.0
    return shared / unique


def rescale_factor(method: str, rho: float, *, r: float, alpha: float) -> float:
    """Rescale factor lambda of an agent's unique elements.

    `"ram_plus"` is 1 + r * clip(rho, 0, alpha) (equation 6), `"ram_plus_soft"` is 1 + r * rho / (1 + rho)
    (appendix E), `"ram"` is 1 (section 5.1: r = 0).
    """
    if method == "ram_plus":
        return 1.0 + r * min(max(rho, 0.0), alpha)
    if method == "ram_plus_soft":
        return 1.0 + r * (1.0 if math.isinf(rho) else rho / (1.0 + rho))
    assert method == "ram", method
    return 1.0


def selective_merge_tile(
    base: Tensor, updates: Sequence[TileUpdate], factors: Sequence[float], weights: Sequence[float]
) -> Tensor:
    """Base plus merged task vector (equation 7), one tile.

    Unchanged elements keep the base's value, unique ones become base + w_t * lambda_t * delta_t, shared ones base +
    the mean of the active deltas weighted by w_t. A unique element is computed as value + (w_t * lambda_t - 1) *
    delta_t, the same number: with a factor of 1 it keeps the agent's own bits.

    Args:
        base (`Tensor`):
            Parameters of the base model, float32, flat.
        updates (`Sequence[TileUpdate]`):
            The agents that touch this tile, masked.
        factors (`Sequence[float]`):
            Rescale factor lambda of every agent of the merge.
        weights (`Sequence[float]`):
            Weight w of every agent of the merge, positive.

    Returns:
        `Tensor`: float32, flat.
    """
    merged = base
    weighted_sum = torch.zeros_like(base)
    weight_total = torch.zeros_like(base)
    for update in updates:
        weight = weights[update.agent]
        gain = weight * factors[update.agent] - 1.0
        # Without a gain the value is taken, not computed: -0.0 stays.
        own = torch.add(update.value, update.delta, alpha=gain) if gain else update.value
        merged = select(update.active, own, merged)
        weighted_sum.add_(update.delta, alpha=weight)
        weight_total.add_(update.active.float(), alpha=weight)
    shared_value = weighted_sum.div_(weight_total).add_(base)
    return select(overlap_counts(updates) > 1, shared_value, merged)


def unique_magnitudes(base: Tensor, written: Tensor, updates: Sequence[TileUpdate]) -> list[tuple[float, float]]:
    """How large each agent's unique changes are in the written tile, and how large they were in the agent.

    Args:
        base (`Tensor`):
            Parameters of the base model, float32, flat.
        written (`Tensor`):
            Merged parameters as rounded to the output's dtype, flat.
        updates (`Sequence[TileUpdate]`):
            The agents that touch this tile, with their masks; at least one.

    Returns:
        `list[tuple[float, float]]`: for every update the sum over its unique elements of (written - base) *
        sign(delta) and of |delta|.
    """
    applied = written.float() - base
    if kernels.compiled and applied.device.type == "cpu":
        agents = [(array_of(update.delta), update.active.numpy()) for update in updates]
        return kernels.compiled.magnitudes(array_of(applied), agents)
    unique, magnitudes = overlap_counts(updates) == 1, []
    for update in updates:
        # of another agent's unique elements too this one may have changed a little
        own = update.delta * (unique & update.active)
        sums = (applied * own.sign(), own.abs())
        magnitudes.append(tuple(float(values.sum(dtype=torch.float64)) for values in sums))
    return magnitudes


def _count(bitmaps: list[np.ndarray]) -> list[int]:
    """Overlap counts of bitmaps, as [`OverlapCounts.to_list`] has them, but for the elements that none changed."""
    masks = np.array([unpack_bits(bitmap, 8 * len(bitmap)) for bitmap in bitmaps])
    overlap = masks.sum(axis=0)
    histogram = [0, *(int(np.count_nonzero(overlap == k)) for k in range(1, len(masks) + 1))]
    changed, unique = (np.count_nonzero(some, axis=1).tolist() for some in (masks, masks & (overlap == 1)))
    return [*changed, *unique, *histogram]
