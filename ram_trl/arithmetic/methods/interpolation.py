"""Linear interpolation between the base and the mean of the agents.

With one agent it is the merge step of Iterative Model Merging
([2503.02103](https://huggingface.co/papers/2503.02103)), which takes an agent part of the way back to its base.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from ..ram import TileUpdate
from .method import Method, Option, TileContext, weighted_sum


__all__ = ["INTERPOLATION"]


def _merge_tile(base: Tensor, updates: Sequence[TileUpdate], context: TileContext) -> Tensor:
    """(1 - t) * base + t * sum_t w_t theta_t / sum_t w_t."""
    share = context.options["t"] / math.fsum(context.weights)
    return weighted_sum(base, updates, [share * weight for weight in context.weights])


INTERPOLATION = Method(
    name="interpolation",
    title="linear interpolation",
    summary="Every parameter is a point on the line from the base to the mean of the agents.",
    paper="2503.02103",
    merge_tile=_merge_tile,
    options={"t": Option(default=0.5, low=0.0, high=1.0)},
)
