"""Linear layers that a method sees whole: their deltas, one agent's after another, and what the method makes of them.

One tensor is in memory at a time. It is computed by fixed panels, so the result does not depend on threads or ranks.
"""

import contextlib

import torch
from torch import Tensor

from ..arithmetic.codec import is_finite
from ..arithmetic.methods import METHODS
from ..arithmetic.tile import TileMerge
from ..threads import Scratch, in_threads
from .blocks import Block, base_first, blocks_of, read_base
from .plan import MergePlan


__all__ = ["merge_matrix"]


def merge_matrix(plan: MergePlan, name: str, how: TileMerge) -> Tensor:
    """The merged delta of a tensor.

    Args:
        plan ([`~ram_trl.merging.plan.MergePlan`]):
            The merge.
        name (`str`):
            A tensor that the method sees whole ([`MergePlan.is_whole`]).
        how ([`~ram_trl.arithmetic.tile.TileMerge`]):
            How to merge.

    Returns:
        `Tensor`: float32, flat, on the CPU.

    Raises:
        NonFiniteError: if an agent holds NaN or infinity.
    """
    shape = plan.base.tensors[name].shape
    deltas = (
        (position, _read_delta(plan, position, name).view(shape).to(how.device)) for position in plan.touched_by[name]
    )
    return METHODS[how.method].merge_matrix(deltas, how.context(name, 0)).cpu().view(-1)


def _read_delta(plan: MergePlan, position: int, name: str) -> Tensor:
    """All of an agent's changes of a tensor: float32, flat."""
    vector, scratch = plan.vectors[position], Scratch()
    delta = torch.zeros(plan.base.tensors[name].numel)

    def fill(block: Block) -> None:
        base = read_base(plan, block, scratch)
        for start, stop in block.tiles():
            with base_first(plan, name):
                update = vector.update(position, name, start, base[start - block.start : stop - block.start])
                if update is None:
                    continue
                if not is_finite(update.delta):
                    raise vector.diverged(name)
                delta[start:stop] = update.delta

    with contextlib.closing(in_threads(fill, blocks_of(plan, [name]))) as results:
        for _ in results:
            pass
    return delta
