"""The unique part of one agent and nothing else (RAM's paper, section 3.2 and figure 3): what averaging would dilute.

The other agents of the merge say what is unique, and nothing of them is merged.
"""

from collections.abc import Sequence

from torch import Tensor

from ..ram import TileUpdate, overlap_counts
from ..select import select
from .method import Method, Option, TileContext


__all__ = ["ISOLATE"]

# Position of the agent whose unique part is kept.
_FIRST = 0


def _merge_tile(base: Tensor, updates: Sequence[TileUpdate], context: TileContext) -> Tensor:
    """Base + scaling * delta_1 where agent 1 alone is active (c = 1), base elsewhere."""
    first = next((update for update in updates if update.agent == _FIRST), None)
    if first is None:
        return base
    unique = first.active & (overlap_counts(updates) == 1)
    gain = context.options["scaling"] - 1.0
    # without a gain the agent's own bits stay
    own = first.value.add(first.delta, alpha=gain) if gain else first.value
    return select(unique, own, base)


ISOLATE = Method(
    name="isolate",
    title="the unique part of the first agent",
    summary="What the first agent alone changed is kept; everything else is the base's.",
    paper="2601.13572",
    merge_tile=_merge_tile,
    is_masked=True,
    options={"scaling": Option(default=1.0, low=0.0, high=10.0)},
)
