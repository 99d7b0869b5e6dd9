"""The plain average of the models: the baseline that dilutes what only one agent changed (paper, section 3.2)."""

import math
from collections.abc import Sequence

from .method import TileContext, sum_method


__all__ = ["AVERAGE"]


def _coefficients(context: TileContext) -> Sequence[float]:
    """Base + sum_t w_t delta_t / sum_t w_t, over all agents of the merge: one that changed nothing counts too."""
    total = math.fsum(context.weights)
    return [weight / total for weight in context.weights]


AVERAGE = sum_method(
    _coefficients,
    name="average",
    title="plain average",
    summary="Every parameter is the mean of the agents' own.",
    paper="2203.05482",
)
