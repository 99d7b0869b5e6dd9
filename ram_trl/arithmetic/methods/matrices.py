"""What the methods that see a linear layer whole have in common: which layers, and sums that threads do not change."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ...threads import Workers, in_threads
from ..rounding import uniform


__all__ = ["in_panels", "is_linear_layer", "leading_vector", "one_thread"]

# Rows of a matrix that a thread works on; fixed, because products of other shapes may round otherwise.
_PANEL = 256
# The Lanczos process ends when the product misses a multiple of the vector by no more than this, relative to the
# largest singular value's square. It looks after so many steps, and then after a quarter more.
_RESIDUAL, _FIRST_LOOK = 1e-12, 8
# Parts of the names of matrices that are tables or norms: WUDI and ResMerge average them.
_NOT_LINEAR = ("embed", "wte", "wpe", "lm_head", "norm", "ln_")


def is_linear_layer(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is the weight of a linear layer, and neither an embedding nor the output head."""
    return len(shape) == 2 and min(shape) > 0 and not any(part in name.lower() for part in _NOT_LINEAR)


def _panels(size: int) -> list[slice]:
    return [slice(start, min(start + _PANEL, size)) for start in range(0, size, _PANEL)]


def in_panels(work: Callable[[slice], None], size: int) -> None:
    """Do some work on every panel of `size` rows (or columns), by threads, each with one thread of torch."""
    for _ in in_threads(work, _panels(size)):
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


def leading_vector(matrix: Tensor) -> Tensor | None:
    """The right singular vector of the largest singular value, by the Lanczos process on matrix^T matrix.

    The start and the panels are fixed, so the result does not depend on threads. All vectors are kept and made
    orthogonal: after as many steps as there are columns the result is exact. Noise takes a few hundred steps, and much
    less time than a whole decomposition.

    Args:
        matrix (`Tensor`):
            float32, 2-D.

    Returns:
        `Tensor`: float64, of the length of a row, of norm 1; `None` for a matrix of 0.
    """
    size, look = matrix.shape[1], _FIRST_LOOK
    start = uniform(size, seed=0, name="leading_vector", start=0, device=matrix.device).double() - 0.5
    diagonal: list[float] = []
    beside: list[float] = []
    gram = _gram(matrix)
    # not in and out: the number of threads of some libraries is that of all threads
    with Workers() as workers, one_thread():
        basis = [start / torch.linalg.vector_norm(start)]
        while True:
            image = _product(workers, gram, basis[-1])
            diagonal.append(float(image @ basis[-1]))
            known = torch.stack(basis)
            # once leaves rounding of the size of what is taken away
            for _ in range(2):
                image = image - known.T @ (known @ image)
            length = float(torch.linalg.vector_norm(image))
            is_last = len(basis) == size or length <= _RESIDUAL * max(diagonal)
            if is_last or len(basis) >= look:
                look = len(basis) + max(1, len(basis) // 4)
                values, vectors = torch.linalg.eigh(_tridiagonal(diagonal, beside))
                if is_last or length * abs(float(vectors[-1, -1])) <= _RESIDUAL * float(values[-1]):
                    found = known.T @ vectors[:, -1].to(matrix.device)
                    return found / torch.linalg.vector_norm(found) if values[-1] > 0 else None
            beside.append(length)
            basis.append(image / length)


def _gram(matrix: Tensor) -> Tensor:
    """matrix^T matrix, float64."""
    size = matrix.shape[1]
    out = torch.zeros(size, size, dtype=torch.float64, device=matrix.device)

    def fill(columns: slice) -> None:
        # what is above the diagonal, and its mirror image
        part = out[: columns.stop, columns]
        for rows in _panels(len(matrix)):
            panel = matrix[rows, : columns.stop].double()
            part.addmm_(panel.T, panel[:, columns])
        out[columns, : columns.start] = part[: columns.start].T

    in_panels(fill, size)
    return out


def _product(workers: Workers, matrix: Tensor, vector: Tensor) -> Tensor:
    """matrix vector, float64."""
    out = torch.empty_like(vector)
    for rows in _panels(len(matrix)):
        workers.put(partial(torch.mv, matrix[rows], vector), out[rows].copy_)
    workers.drain()
    return out


def _tridiagonal(diagonal: Sequence[float], beside: Sequence[float]) -> Tensor:
    upper = torch.diag(torch.tensor(beside, dtype=torch.float64), 1) if beside else 0.0
    return torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + upper + (upper.T if beside else 0.0)
