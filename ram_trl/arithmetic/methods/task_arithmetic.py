"""Task Arithmetic ([2212.04089](https://huggingface.co/papers/2212.04089)): the task vectors are added."""

from collections.abc import Sequence

from .method import Option, TileContext, sum_method


__all__ = ["SCALING", "TASK_ARITHMETIC"]

# Without a validation set the paper recommends to begin at 0.3 to 0.5; the TIES paper takes 0.4 for it.
SCALING = Option(default=0.4, low=0.0, high=10.0)


def _coefficients(context: TileContext) -> Sequence[float]:
    """Base + scaling * sum_t w_t delta_t."""
    return [context.options["scaling"] * weight for weight in context.weights]


TASK_ARITHMETIC = sum_method(
    _coefficients,
    name="task_arithmetic",
    title="Task Arithmetic",
    summary="The agents' changes are added, all times the same factor.",
    paper="2212.04089",
    options={"scaling": SCALING},
)
