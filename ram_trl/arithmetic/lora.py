"""Deltas of low-rank adapters, some rows at a time."""

from dataclasses import dataclass

from torch import Tensor

from .select import keep


__all__ = ["LoraFactors", "lora_delta", "visible_delta"]


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """One low-rank update of one 2-D tensor W of shape (rows, columns).

    Args:
        left (`Tensor`):
            Shape (rows, rank), float32.
        right (`Tensor`):
            Shape (rank, columns), float32.
        scaling (`float`):
            Factor of the product, PEFT's `layer.scaling`.
    """

    left: Tensor
    right: Tensor
    scaling: float

    @classmethod
    def from_peft(cls, factor_a: Tensor, factor_b: Tensor, scaling: float, transposed: bool) -> "LoraFactors":
        """From PEFT's A (rank, in) and B (out, rank); `transposed`: W is stored as (in, out)."""
        left, right = (factor_a.T, factor_b.T) if transposed else (factor_b, factor_a)
        return cls(left.float().contiguous(), right.float().contiguous(), scaling)


def lora_delta(factors: LoraFactors, start: int, stop: int) -> Tensor:
    """Elements `start ... stop - 1` of the flattened product, scaled: float32, flat."""
    columns = factors.right.shape[1]
    first_row, end_row = start // columns, -(-stop // columns)
    rows = (factors.left[first_row:end_row] @ factors.right).mul_(factors.scaling)
    return rows.view(-1)[start - first_row * columns : stop - first_row * columns]


def visible_delta(delta: Tensor, base: Tensor) -> Tensor:
    """The delta where adding it changes the base in the base's own dtype, 0 elsewhere: what deployment executes."""
    return keep((base.float() + delta).to(base.dtype) != base, delta)
