"""DARE ([2311.03099](https://huggingface.co/papers/2311.03099)) with Task Arithmetic: drop at random, rescale, add.

Which changes are dropped is a function of (seed, agent, tensor, index) alone: the same for any tiles and processes.
"""

from collections.abc import Sequence

from torch import Tensor

from ..ram import TileUpdate
from ..rounding import uniform
from .method import Method, Option, TileContext
from .task_arithmetic import SCALING


__all__ = ["DARE", "DROP_RATE", "drop_and_rescale"]

# The paper searches 0.1 to 0.9; 0.2 is what the authors' repository merges language models with.
DROP_RATE = Option(default=0.2, low=0.0, high=0.999)


def drop_and_rescale(update: TileUpdate, context: TileContext) -> Tensor:
    """An agent's changes: each 0 with probability p = `drop_rate`, else divided by 1 - p. Float32, flat."""
    drop_rate = context.options["drop_rate"]
    drawn = uniform(
        update.delta.numel(),
        seed=context.seed,
        name=f"dare/{context.agents[update.agent]}/{context.name}",
        start=context.start,
        device=update.delta.device,
    )
    return (update.delta * (drawn >= drop_rate)).div_(1.0 - drop_rate)


def _merge_tile(base: Tensor, updates: Sequence[TileUpdate], context: TileContext) -> Tensor:
    """Base + scaling * sum_t w_t (what is left of delta_t)."""
    merged = base.clone()
    for update in updates:
        weight = context.weights[update.agent]
        merged.add_(drop_and_rescale(update, context), alpha=context.options["scaling"] * weight)
    return merged


DARE = Method(
    name="dare",
    title="DARE + Task Arithmetic",
    summary="Changes are dropped at random, the rest is enlarged to make up for it, and added.",
    paper="2311.03099",
    merge_tile=_merge_tile,
    options={"drop_rate": DROP_RATE, "scaling": SCALING},
)
