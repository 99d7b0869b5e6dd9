"""ResMerge ([2606.02252](https://huggingface.co/papers/2606.02252)): residuals first, lengthened where they agree.

delta_t = H_t + R_t, H_t being the part along the largest singular value. With q_t = R_t / ||R_t||, means over the
agents (weighted by w_t) and cosines of whole matrices:

    Q = mean q_t,  c = mean cos(q_t, Q) = ||Q||,  s = mean cos(q_t, q_u) over pairs
    beta = beta_max - (beta_max - beta_min) * (c + s + 2) / 4
    A = c^beta * mean ||R_t|| * Q / ||Q||,   or mean R_t if c <= 1 / sqrt(N), as random directions have
    merged = A + head * mean max(0, cos(H_t, H_u)) * ||A|| * mean H_t / ||mean H_t||

An agent that did not change the matrix counts in the means, as in the authors' code; only pairs of heads are of those
that have one. Residuals are added up as they come, so memory does not grow with the agents.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from .average import AVERAGE
from .matrices import in_panels, leading_vector, one_thread
from .method import Method, Option, TileContext


__all__ = ["RESMERGE"]

# Residuals of agents that changed different elements are exactly orthogonal; rounding must not decide about them.
_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class _Head:
    """w and the vectors of H = left right^T: `left` of length 1."""

    weight: float
    left: Tensor
    right: Tensor


def _merge_matrix(deltas: Iterable[tuple[int, Tensor]], context: TileContext) -> Tensor:
    weights, total = context.weights, math.fsum(context.weights)
    direction = mean = None
    heads, norms, directed = [], [], []
    # each delta is read here, by as many threads as there are
    for agent, delta in deltas:
        share = weights[agent] / total
        if direction is None:
            direction, mean = torch.zeros_like(delta), torch.zeros_like(delta)
        head = _leading_part(delta, share)
        if head is None:
            continue
        with one_thread():
            heads.append(head)
            residual = torch.addr(delta, head.left, head.right, alpha=-1.0)
            mean.add_(residual, alpha=share)
            norm = _norm(residual)
            # of a delta of rank 1 nothing but rounding is left
            if norm > _TOLERANCE * _norm(delta):
                norms.append(share * norm)
                directed.append(share)
                direction.add_(residual, alpha=share / norm)
    with one_thread():
        backbone = _backbone(direction, mean, math.fsum(norms), directed, [w / total for w in weights], context)
        return _add_heads(backbone, heads, context.options["head"])


def _leading_part(delta: Tensor, weight: float) -> _Head | None:
    """The part along the largest singular value; `None` of a 0."""
    is_wide = delta.shape[0] <= delta.shape[1]
    long = delta.T if is_wide else delta
    vector = leading_vector(long)
    if vector is None:
        return None
    other = vector.new_empty(len(long))
    in_panels(lambda rows: other[rows].copy_(long[rows].double() @ vector), len(long))
    with one_thread():
        norm = torch.linalg.vector_norm(other)
    left, right = (vector, other) if is_wide else (other / norm, vector * norm)
    return _Head(weight, left.float(), right.float())


def _backbone(
    direction: Tensor,
    mean: Tensor,
    mean_norm: float,
    directed: Sequence[float],
    shares: Sequence[float],
    context: TileContext,
) -> Tensor:
    """A: the mean residual, lengthened in the direction that the residuals have in common."""
    coherence = min(1.0, _norm(direction))
    if coherence <= math.sqrt(math.fsum(share**2 for share in shares)) * (1.0 + _TOLERANCE):
        return mean
    pairs = 1.0 - math.fsum(share**2 for share in shares)
    agreement = (coherence**2 - math.fsum(share**2 for share in directed)) / pairs
    low, high = context.options["beta_min"], context.options["beta_max"]
    beta = high - (high - low) * (coherence + agreement + 2.0) / 4.0
    return direction.mul_(coherence**beta * mean_norm / _norm(direction))


def _add_heads(backbone: Tensor, heads: Sequence[_Head], budget: float) -> Tensor:
    """The backbone and, as far as the heads agree, their mean."""
    mean = torch.zeros_like(backbone)
    for head in heads:
        mean.addr_(head.left, head.right, alpha=head.weight)
    norm = _norm(mean)
    if norm == 0.0:
        return backbone
    pairs = list(combinations(heads, 2))
    agreement = 1.0
    if pairs:
        cosines = [max(0.0, _cosine(one, other)) * one.weight * other.weight for one, other in pairs]
        agreement = math.fsum(cosines) / math.fsum(one.weight * other.weight for one, other in pairs)
    return backbone.add(mean, alpha=budget * agreement * _norm(backbone) / norm)


def _norm(matrix: Tensor) -> float:
    """Frobenius norm, added up in float64: float32 loses more than `_TOLERANCE` over millions of squares."""
    return float(torch.linalg.vector_norm(matrix, dtype=torch.float64))


def _cosine(one: _Head, other: _Head) -> float:
    rights = torch.dot(one.right, other.right) / (one.right.norm() * other.right.norm())
    return float(torch.dot(one.left, other.left) * rights)


RESMERGE = Method(
    name="resmerge",
    title="ResMerge",
    summary="Of each linear layer the residuals beside the leading direction are merged along what they have in "
    "common; everything else is averaged.",
    paper="2606.02252",
    merge_tile=AVERAGE.merge_tile,
    merge_matrix=_merge_matrix,
    options={
        "beta_min": Option(default=0.7, low=0.0, high=1.0, at_most="beta_max"),
        "beta_max": Option(default=1.0, low=0.0, high=1.0),
        "head": Option(default=0.2, low=0.0, high=10.0),
    },
)
