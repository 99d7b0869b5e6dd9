"""The two streaming passes over the model: probe counts, merge computes and writes.

A rank's tensors are cut into blocks. Every thread takes a block at a time and does all of the work on it, tile by
tile: reading, checking, decoding, arithmetic, writing. So memory is bounded by threads and agents, not by the model,
and the disk is busy while others compute.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ..arithmetic.codec import is_finite, is_mergeable
from ..arithmetic.methods import METHODS
from ..arithmetic.ram import OverlapCounts, TileUpdate, count_overlaps
from ..arithmetic.tile import (
    Finiteness,
    PackedUpdate,
    TileMerge,
    merge_tile_compiled,
    merge_tile_eager,
    round_tile,
)
from ..errors import NonFiniteError
from ..storage.base_model import BaseDigests
from ..storage.checkpoint import TensorWriter
from ..storage.tensor_file import digest_piece
from ..threads import Scratch, in_threads
from .blocks import Block, base_first, blocks_of, read_base
from .matrices import merge_matrix
from .plan import MergePlan


__all__ = ["merge_tensors", "probe_tensors"]

# For every agent the magnitude of its unique changes as written, and in the agent.
Magnitudes = list[tuple[float, float]]


def probe_tensors(plan: MergePlan, names: Sequence[str], advance: Callable[[int], None]) -> OverlapCounts:
    """Count overlaps in some of the tensors (section 4.1). The base is read only where masks are not stored.

    Args:
        plan ([`MergePlan`]):
            The merge.
        names (`Sequence[str]`):
            Tensors to count.
        advance (`Callable[[int], None]`):
            Called with the bytes of every block that is done.

    Raises:
        BaseModelError: if a tensor of the base is not what was recorded.
        NonFiniteError: if an agent holds NaN or infinity.
    """
    epsilon, scratch = plan.settings.epsilon, Scratch()
    needs_base = {
        name
        for name, agents in plan.touched_by.items()
        if not all(plan.vectors[at].stores_masks(epsilon) for at in agents)
    }

    def count(block: Block) -> tuple[OverlapCounts, list[bytes]]:
        counts, digests = OverlapCounts.zeros(len(plan.agents)), []
        if not is_mergeable(plan.base.tensors[block.name].dtype):
            return counts, digests
        base = None
        if block.name in needs_base:
            base = read_base(plan, block, scratch)
            digests = [digest_piece(base)]
        for start, stop in block.tiles():
            tile = None if base is None else base[start - block.start : stop - block.start]
            masks = {}
            for position in plan.touched_by.get(block.name, ()):
                with base_first(plan, block.name):
                    mask = plan.vectors[position].mask(block.name, start, stop - start, tile, epsilon)
                if mask is not None:
                    masks[position] = mask
            count_overlaps(masks, stop - start, counts)
        return counts, digests

    total, checked = OverlapCounts.zeros(len(plan.agents)), BaseDigests(plan.base, plan.records)
    # closed here: no thread goes on with files that are closed after a failure
    with contextlib.closing(in_threads(count, blocks_of(plan, names))) as results:
        for block, (counts, digests) in results:
            total.add(counts)
            for digest in digests:
                checked.add(block.name, digest)
            advance(block.nbytes)
    return total


def merge_tensors(
    plan: MergePlan,
    names: Sequence[str],
    how: TileMerge,
    writer: TensorWriter,
    advance: Callable[[int], None],
) -> dict[str, Magnitudes]:
    """Merge some of the tensors (section 4.3) and write them. Every byte of the base is checked on the way.

    Args:
        plan ([`MergePlan`]):
            The merge.
        names (`Sequence[str]`):
            Tensors to merge.
        how ([`~ram_trl.arithmetic.tile.TileMerge`]):
            How to merge a tile.
        writer ([`~ram_trl.storage.checkpoint.TensorWriter`]):
            Where to write.
        advance (`Callable[[int], None]`):
            Called with the bytes of every block that is done.

    Returns:
        `dict[str, list[tuple[float, float]]]`: for every changed tensor and agent, the magnitude of the agent's unique
        changes in the written model and in the agent; their ratio is the effective lambda.

    Raises:
        BaseModelError: if a tensor of the base is not what was recorded.
        NonFiniteError: if an agent or the result holds NaN or infinity.
    """
    scratch = Scratch()

    def merge(block: Block, matrix: Tensor | None = None) -> tuple[list[tuple[str, bytes]], Magnitudes]:
        base = read_base(plan, block, scratch)
        copies = plan.copies_of[block.name]
        digests = [(block.name, digest_piece(base))]
        for copy in copies:
            if copy.name != block.name:
                repeat = plan.base.read(copy.name, block.start, block.stop)
                digests.append((copy.name, digest_piece(repeat)))
        with base_first(plan, block.name):
            merged, magnitudes = _merge_block(plan, block, base, how, scratch, matrix)
        for copy in copies:
            writer.write(copy.name, block.start, merged)
        return digests, magnitudes

    parts: dict[str, list[Magnitudes]] = {}
    checked = BaseDigests(plan.base, plan.records)

    def take(results: Iterator[tuple[Block, tuple[list[tuple[str, bytes]], Magnitudes]]]) -> None:
        with contextlib.closing(results):
            for block, (digests, magnitudes) in results:
                for name, digest in digests:
                    checked.add(name, digest)
                if magnitudes:
                    parts.setdefault(block.name, []).append(magnitudes)
                advance(block.nbytes)

    take(in_threads(merge, blocks_of(plan, [name for name in names if not plan.is_whole(name)])))
    for name in filter(plan.is_whole, names):
        matrix = merge_matrix(plan, name, how)
        take(in_threads(partial(merge, matrix=matrix), blocks_of(plan, [name])))
    return {name: _add_magnitudes(blocks) for name, blocks in parts.items()}


def _merge_block(
    plan: MergePlan, block: Block, base: Tensor, how: TileMerge, scratch: Scratch, matrix: Tensor | None
) -> tuple[Tensor, Magnitudes]:
    """Merged parameters of a block, and the magnitudes of the agents' unique changes; none if nothing is changed.

    `matrix` is the merged delta of the whole tensor, where the method sees it whole.
    """
    dtype = plan.copies_of[block.name][0].dtype
    if not is_mergeable(base.dtype):
        return base, []
    data = scratch.take(base.numel() * dtype.itemsize, "merged")
    merged, tiles = torch.from_numpy(data).view(dtype), []
    for start, stop in block.tiles():
        inside = slice(start - block.start, stop - block.start)
        updates = _updates(plan, block.name, start, base[inside], how.ignored)
        if not updates and matrix is None:
            _check_finite(block.name, round_tile(base[inside], how, block.name, start, merged[inside]), dtype, how)
            continue
        arguments = base[inside], updates, how, block.name, start, merged[inside]
        if plan.is_compiled:
            tile = merge_tile_compiled(*arguments)
        else:
            fishers = [fisher.read(block.name, start, stop).float() for fisher in plan.fishers]
            tile = merge_tile_eager(*arguments, None if matrix is None else matrix[start:stop], fishers)
            if tile.finiteness is Finiteness.NOT_FINITE:
                _check_fishers(plan, block.name, fishers)
        if tile.diverged:
            finiteness = Finiteness.FINITE if is_finite(base[inside]) else Finiteness.NOT_FINITE
            _check_finite(block.name, finiteness, dtype, how)
            raise plan.vectors[tile.diverged[0]].diverged(block.name)
        _check_finite(block.name, tile.finiteness, dtype, how)
        magnitudes = [(0.0, 0.0)] * len(plan.agents)
        for update, pair in zip(updates, tile.magnitudes, strict=True):
            magnitudes[update.agent] = pair
        tiles.append(magnitudes)
    return merged, _add_magnitudes(tiles)


def _updates(plan: MergePlan, name: str, start: int, base: Tensor, epsilon: float) -> list[TileUpdate | PackedUpdate]:
    """What the agents that touch a tile make of it."""
    updates = []
    for position in plan.touched_by.get(name, ()):
        vector = plan.vectors[position]
        if plan.is_compiled:
            update = vector.packed_update(position, name, start, base, epsilon)
        else:
            update = vector.update(position, name, start, base, epsilon)
        if update is not None:
            updates.append(update)
    return updates


def _check_finite(name: str, finiteness: Finiteness, dtype: torch.dtype, how: TileMerge) -> None:
    """Refuse to write NaN and infinity."""
    if finiteness is Finiteness.TOO_LARGE:
        raise NonFiniteError(f"merged tensor {name!r} has values beyond {dtype}: choose --output_dtype float32")
    if finiteness is Finiteness.NOT_FINITE:
        factor = "r" if METHODS[how.method].rescale else f"the options of {how.method}"
        raise NonFiniteError(
            f"merged tensor {name!r} has NaN or infinity: look at the base, and at weights and {factor}"
        )


def _check_fishers(plan: MergePlan, name: str, fishers: Sequence[Tensor]) -> None:
    """Refuse Fisher information with NaN or infinity."""
    for stored, fisher in zip(plan.recorded[len(plan.agents) :], fishers, strict=True):
        if not is_finite(fisher):
            raise NonFiniteError(f"the Fisher of agent {stored.agent} has NaN or infinity in {name!r}: {stored.cure}")


def _add_magnitudes(parts: list[Magnitudes]) -> Magnitudes:
    """Sums over tiles or blocks, exact, so that their order does not matter."""
    return [
        (math.fsum(after for after, _ in pairs), math.fsum(before for _, before in pairs))
        for pairs in zip(*parts, strict=True)
    ]
