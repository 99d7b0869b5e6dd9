"""Linear interpolation between the base and the mean of the agents.

With one agent it is the merge step of Iterative Model Merging
([2503.02103](https://huggingface.co/papers/2503.02103)), which takes an agent part of the way back to its base.
"""

import math
from collections.abc import Sequence

from .method import Option, TileContext, sum_method


__all__ = ["INTERPOLATION"]


def _coefficients(context: TileContext) -> Sequence[float]:
    """(1 - t) * base + t * sum_t w_t theta_t / sum_t w_t."""
    share = context.options["t"] / math.fsum(context.weights)
    return [share * weight for weight in context.weights]


INTERPOLATION = sum_method(
    _coefficients,
    name="interpolation",
    title="linear interpolation",
    summary="Every parameter is a point on the line from the base to the mean of the agents.",
    paper="2503.02103",
    options={"t": Option(default=0.5, low=0.0, high=1.0)},
)
