"""DARE ([2311.03099](https://huggingface.co/papers/2311.03099)) with Task Arithmetic: drop at random, rescale, add.

Which changes are dropped is a function of (seed, agent, tensor, index) alone: the same for any tiles and processes.
"""

from collections.abc import Sequence

from torch import Tensor

from ..ram import TileUpdate
from ..rounding import uniform
from ..select import keep
from .method import Method, Option, TileContext
from .task_arithmetic import SCALING


__all__ = ["DARE", "DROP_RATE", "drop", "rescaled"]

# The paper searches 0.1 to 0.9; 0.2 is what the authors' repository merges language models with.
DROP_RATE = Option(default=0.2, low=0.0, high=0.999)


def drop(update: TileUpdate, context: TileContext) -> Tensor:
    """An agent's changes, each 0 with probability p = `drop_rate`: float32, flat. They are not divided by 1 - p."""
    drawn = uniform(
        update.delta.numel(),
        seed=context.seed,
        name=f"dare/{context.agents[update.agent]}/{context.name}",
        start=context.start,
        device=update.delta.device,
    )
    return keep(drawn >= context.options["drop_rate"], update.delta)


def rescaled(context: TileContext) -> float:
    """The scaling, with the division by 1 - p that makes up for what was dropped.

    Trimming, electing and averaging are the same at any scale. On the changes themselves processors divide differently
    in the last bit, and a GPU would trim others of equal size than those that the CPU counted.
    """
    return context.options["scaling"] / (1.0 - context.options["drop_rate"])


def _merge_tile(base: Tensor, updates: Sequence[TileUpdate], context: TileContext) -> Tensor:
    """Base + scaling / (1 - p) * sum_t w_t (what is left of delta_t)."""
    merged, scaling = base.clone(), rescaled(context)
    for update in updates:
        merged.add_(drop(update, context), alpha=scaling * context.weights[update.agent])
    return merged


DARE = Method(
    name="dare",
    title="DARE + Task Arithmetic",
    summary="Changes are dropped at random, the rest is enlarged to make up for it, and added.",
    paper="2311.03099",
    merge_tile=_merge_tile,
    options={"drop_rate": DROP_RATE, "scaling": SCALING},
)
