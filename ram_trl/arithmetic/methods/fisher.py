"""Fisher merging ([2111.09832](https://huggingface.co/papers/2111.09832)): a mean weighted by how sure each agent is.

F is the diagonal of an agent's empirical Fisher information: the mean square of the gradient of its log-likelihood
over examples of its task (`recipes/fisher.py`), of their own labels, where the paper takes the expectation over what
the model would say. An agent that did not change a parameter has a say in it all the same.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ram import TileUpdate
from .method import Method, Option, TileContext


__all__ = ["FISHER"]

# Where no agent's gradient is larger the plain mean is left, and not 0 / 0.
_FLOOR = 1e-30


def _merge_tile(base: Tensor, updates: Sequence[TileUpdate], context: TileContext) -> Tensor:
    """Base + scaling * sum_t w_t F_t delta_t / sum_t w_t F_t (RAM's paper, appendix D.1)."""
    total, mass = torch.zeros_like(base), torch.zeros_like(base)
    # relative to the largest, as products of small numbers would vanish
    fishers = [fisher.clamp(min=_FLOOR) for fisher in context.fishers]
    largest = torch.stack(fishers).amax(dim=0)
    shares = [fisher / largest for fisher in fishers]
    for share, weight in zip(shares, context.weights, strict=True):
        mass.add_(share, alpha=weight)
    for update in updates:
        total.add_(shares[update.agent] * update.delta, alpha=context.weights[update.agent])
    return base.add(total.div_(mass), alpha=context.options["scaling"])


FISHER = Method(
    name="fisher",
    title="Fisher merging",
    summary="Every parameter is the mean of the agents' own, weighted by their Fisher information.",
    paper="2111.09832",
    merge_tile=_merge_tile,
    needs_fisher=True,
    options={"scaling": Option(default=1.0, low=0.0, high=10.0)},
)
