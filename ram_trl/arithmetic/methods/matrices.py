"""What the methods that see a linear layer whole have in common: which layers, and sums that threads do not change."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from ...threads import in_threads


__all__ = ["in_panels", "is_linear_layer", "one_thread"]

# Rows of a matrix that a thread works on; fixed, because products of other shapes may round otherwise.
_PANEL = 256
# Parts of the names of matrices that are tables or norms: WUDI and ResMerge average them.
_NOT_LINEAR = ("embed", "wte", "wpe", "lm_head", "norm", "ln_")


def is_linear_layer(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is the weight of a linear layer, and neither an embedding nor the output head."""
    return len(shape) == 2 and min(shape) > 0 and not any(part in name.lower() for part in _NOT_LINEAR)


def in_panels(work: Callable[[slice], None], size: int) -> None:
    """Do some work on every panel of `size` rows (or columns), by threads, each with one thread of torch."""
    for _ in in_threads(work, [slice(start, min(start + _PANEL, size)) for start in range(0, size, _PANEL)]):
        pass


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread of torch, as sums over many elements depend on how threads shared them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
