"""TIES-Merging ([2306.01708](https://huggingface.co/papers/2306.01708)): trim, elect a sign, average who agrees.

Trimming keeps the share `density` of an agent's largest changes: |delta| >= the k-th largest, k = density *
parameters, so that all of several equal ones stay, as in the authors' code. Where the sum of the trimmed changes is
exactly 0 no sign is elected, and the base stays.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ram import TileUpdate
from ..select import keep
from .method import Method, Option, TileContext


__all__ = ["DENSITY", "PER_TENSOR", "SCALING", "TIES", "elect_and_average", "keep_largest"]

# The paper without a validation set: k = 20 %, lambda = 1.
DENSITY = Option(default=0.2, low=1e-6, high=1.0)
SCALING = Option(default=1.0, low=0.0, high=10.0)
# 1 chooses the largest of every tensor, as MergeKit does, and not of the whole task vector.
PER_TENSOR = Option(default=0.0, low=0.0, high=1.0, whole=True)

_FLOOR = 1e-30


def _changes(update: TileUpdate, context: TileContext) -> Tensor:
    return update.delta


def _merge_tile(base: Tensor, updates: Sequence[TileUpdate], context: TileContext) -> Tensor:
    """Base + scaling * disjoint mean of the trimmed changes."""
    trimmed = [keep_largest(update.delta, context.thresholds[update.agent]) for update in updates]
    weights = [context.weights[update.agent] for update in updates]
    return base.add(elect_and_average(trimmed, weights), alpha=context.options["scaling"])


def keep_largest(delta: Tensor, threshold: float) -> Tensor:
    """The changes of at least this magnitude, 0 elsewhere."""
    return keep(delta.abs() >= threshold, delta)


def elect_and_average(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The paper's steps 2 and 3.

    Args:
        deltas (`Sequence[Tensor]`):
            Trimmed changes of each agent, float32, flat.
        weights (`Sequence[float]`):
            Weight w of each of them.

    Returns:
        `Tensor`: sum w_t delta_t / sum w_t over the agents whose sign is that of sum_t w_t delta_t; 0 where none has.
    """
    mass = torch.zeros_like(deltas[0])
    for delta, weight in zip(deltas, weights, strict=True):
        mass.add_(delta, alpha=weight)
    elected = mass.sign()
    total, agreeing = torch.zeros_like(mass), torch.zeros_like(mass)
    for delta, weight in zip(deltas, weights, strict=True):
        agrees = delta * elected > 0
        total.add_(keep(agrees, delta), alpha=weight)
        agreeing.add_(agrees.float(), alpha=weight)
    # weights are larger: where nobody agrees 0 is left
    return total.div_(agreeing.clamp_(min=_FLOOR))


TIES = Method(
    name="ties",
    title="TIES",
    summary="Each agent's largest changes are kept; where they disagree in sign the heavier side is averaged.",
    paper="2306.01708",
    merge_tile=_merge_tile,
    options={"density": DENSITY, "scaling": SCALING, "per_tensor": PER_TENSOR},
    trimmed_from=_changes,
)
