"""DARE ([2311.03099](https://huggingface.co/papers/2311.03099)) before TIES: drop, rescale, trim, elect, average.

The changes that are left after dropping are trimmed as in the authors' code. MergeKit's method of this name does not
trim: `density=1`.
"""

from collections.abc import Sequence

from torch import Tensor

from ..ram import TileUpdate
from .dare import DROP_RATE, drop, rescaled
from .method import Method, TileContext
from .ties import DENSITY, PER_TENSOR, SCALING, elect_and_average, keep_largest


__all__ = ["DARE_TIES"]


def _merge_tile(base: Tensor, updates: Sequence[TileUpdate], context: TileContext) -> Tensor:
    """Base + scaling / (1 - p) * disjoint mean of what is left of the changes."""
    trimmed = [keep_largest(drop(update, context), context.thresholds[update.agent]) for update in updates]
    weights = [context.weights[update.agent] for update in updates]
    return base.add(elect_and_average(trimmed, weights), alpha=rescaled(context))


DARE_TIES = Method(
    name="dare_ties",
    title="DARE + TIES",
    summary="Changes are dropped at random and enlarged; of the largest, those of the heavier sign are averaged.",
    paper="2311.03099",
    merge_tile=_merge_tile,
    options={"drop_rate": DROP_RATE, "density": DENSITY, "scaling": SCALING, "per_tensor": PER_TENSOR},
    trimmed_from=drop,
)
