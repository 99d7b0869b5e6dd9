"""Task Arithmetic ([2212.04089](https://huggingface.co/papers/2212.04089)): the task vectors are added."""

from collections.abc import Sequence

from torch import Tensor

from ..ram import TileUpdate
from .method import Method, Option, TileContext, weighted_sum


__all__ = ["SCALING", "TASK_ARITHMETIC"]

# Without a validation set the paper recommends to begin at 0.3 to 0.5; the TIES paper takes 0.4 for it.
SCALING = Option(default=0.4, low=0.0, high=10.0)


def _merge_tile(base: Tensor, updates: Sequence[TileUpdate], context: TileContext) -> Tensor:
    """Base + scaling * sum_t w_t delta_t."""
    return weighted_sum(base, updates, [context.options["scaling"] * weight for weight in context.weights])


TASK_ARITHMETIC = Method(
    name="task_arithmetic",
    title="Task Arithmetic",
    summary="The agents' changes are added, all times the same factor.",
    paper="2212.04089",
    merge_tile=_merge_tile,
    options={"scaling": SCALING},
)
