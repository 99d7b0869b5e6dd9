"""WUDI-Merging ([2503.08099](https://huggingface.co/papers/2503.08099)): interference is optimised away, without data.

The rows of an agent's delta approximately span the inputs of its layer, so the merged delta is sought that differs
least from every agent's where that agent's inputs are:

    loss(M) = sum_t w_t ||(M - delta_t) delta_t^T||^2 / ||delta_t||^2,   from M = sum_t delta_t, by Adam.

Its gradient is 2 (M S - C) with S = sum_t w_t G_t, C = sum_t w_t delta_t G_t, G_t = delta_t^T delta_t /
||delta_t||^2: a step takes one product of matrices however many agents there are, and rows do not know of each other.
A delta is taken as (out, in), as `torch.nn.Linear` stores it.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from .average import AVERAGE
from .matrices import in_panels
from .method import Method, Option, TileContext


__all__ = ["WUDI"]

# Adam's own.
_BETA_1, _BETA_2, _EPS = 0.9, 0.999, 1e-8


def _merge_matrix(deltas: Iterable[tuple[int, Tensor]], context: TileContext) -> Tensor:
    merged = pull = gram = None
    for agent, delta in deltas:
        if merged is None:
            columns = delta.shape[1]
            merged, pull = torch.zeros_like(delta), torch.zeros_like(delta)
            gram, own = (torch.zeros(columns, columns, device=delta.device) for _ in range(2))
        _normalised_gram(delta, own)
        merged.add_(delta)
        gram.add_(own, alpha=context.weights[agent])
        _add_product(delta, own, context.weights[agent], pull)
    steps, learning_rate = int(context.options["steps"]), context.options["learning_rate"]
    in_panels(lambda rows: _descend(merged[rows], pull[rows], gram, steps, learning_rate), len(merged))
    return merged


def _normalised_gram(delta: Tensor, out: Tensor) -> None:
    """G = delta^T delta / ||delta||^2, whose trace is 1; 0 for a delta of 0."""

    def fill(panel: slice) -> None:
        torch.mm(delta.T, delta[:, panel], out=out[:, panel])

    in_panels(fill, delta.shape[1])
    trace = math.fsum(out.diagonal().tolist())
    if trace > 0:
        out.div_(trace)


def _add_product(delta: Tensor, gram: Tensor, weight: float, out: Tensor) -> None:
    """Add w delta G, in place."""
    in_panels(lambda rows: out[rows].addmm_(delta[rows], gram, alpha=weight), len(delta))


def _descend(merged: Tensor, pull: Tensor, gram: Tensor, steps: int, learning_rate: float) -> None:
    """Adam on some rows, in place."""
    mean, square = torch.zeros_like(merged), torch.zeros_like(merged)
    for step in range(1, steps + 1):
        gradient = torch.addmm(pull, merged, gram, beta=-1.0).mul_(2.0)
        mean.lerp_(gradient, 1.0 - _BETA_1)
        square.mul_(_BETA_2).addcmul_(gradient, gradient, value=1.0 - _BETA_2)
        size = (square / (1.0 - _BETA_2**step)).sqrt_().add_(_EPS)
        merged.addcdiv_(mean, size, value=-learning_rate / (1.0 - _BETA_1**step))


WUDI = Method(
    name="wudi",
    title="WUDI-Merging",
    summary="Each linear layer is optimised until it interferes least with any agent; everything else is averaged.",
    paper="2503.08099",
    merge_tile=AVERAGE.merge_tile,
    merge_matrix=_merge_matrix,
    options={
        "steps": Option(default=300.0, low=0.0, high=100_000.0, whole=True),
        "learning_rate": Option(default=1e-5, low=0.0, high=1.0),
    },
)
