"""The plain average of the models: the baseline that dilutes what only one agent changed (paper, section 3.2)."""

import math
from collections.abc import Sequence

from torch import Tensor

from ..ram import TileUpdate
from .method import Method, TileContext, weighted_sum


__all__ = ["AVERAGE", "merge_tile"]


def merge_tile(base: Tensor, updates: Sequence[TileUpdate], context: TileContext) -> Tensor:
    """Base + sum_t w_t delta_t / sum_t w_t, over all agents of the merge: one that changed nothing counts too."""
    total = math.fsum(context.weights)
    return weighted_sum(base, updates, [weight / total for weight in context.weights])


AVERAGE = Method(
    name="average",
    title="plain average",
    summary="Every parameter is the mean of the agents' own.",
    paper="2203.05482",
    merge_tile=merge_tile,
)
