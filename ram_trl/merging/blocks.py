"""What the passes over the model have in common: how tensors are cut, and how the base is read."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..arithmetic.codec import TILE_NUMEL
from ..errors import NonFiniteError
from ..storage.base_model import BaseDigests
from ..storage.tensor_file import PIECE_NUMEL
from ..threads import Scratch
from .plan import MergePlan


__all__ = ["Block", "base_first", "blocks_of", "read_base"]


@dataclass(frozen=True, slots=True)
class Block:
    """Elements `start ... stop - 1` of a flattened tensor, and their bytes in the base: one piece of its digest."""

    name: str
    start: int
    stop: int
    nbytes: int

    def tiles(self) -> Iterator[tuple[int, int]]:
        """First element and end of every tile of the block."""
        for start in range(self.start, self.stop, TILE_NUMEL):
            yield start, min(start + TILE_NUMEL, self.stop)


def blocks_of(plan: MergePlan, names: Sequence[str]) -> list[Block]:
    """The blocks of some tensors, one tensor after another."""
    blocks = []
    for name in names:
        info = plan.base.tensors[name]
        for start in range(0, info.numel, PIECE_NUMEL):
            stop = min(start + PIECE_NUMEL, info.numel)
            blocks.append(Block(name, start, stop, (stop - start) * info.dtype.itemsize))
    return blocks


def read_base(plan: MergePlan, block: Block, scratch: Scratch) -> Tensor:
    """The base's parameters in a block, valid until this thread reads the next."""
    return plan.base.read(block.name, block.start, block.stop, into=scratch.take(block.nbytes, "base"))


@contextlib.contextmanager
def base_first(plan: MergePlan, name: str) -> Iterator[None]:
    """Over a wrong base an agent can seem to have diverged: what is said then must be said of the base."""
    try:
        yield
    except NonFiniteError:
        BaseDigests(plan.base, plan.records).compare(name, plan.base.digest(name))
        raise
