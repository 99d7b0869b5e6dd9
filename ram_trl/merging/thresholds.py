"""The smallest magnitude that a trimming method keeps of each agent, by two passes over the agents' changes.

The selection is exact (`arithmetic/selection.py`) and streams like everything else. Over the whole model the counts
are summed over the ranks; of a single tensor a rank counts its own. A thread counts a tile in memory of its own and
passes on what it found, so that memory does not grow with the agents that are counted side by side.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ..arithmetic.codec import is_finite
from ..arithmetic.methods import METHODS
from ..arithmetic.selection import BUCKETS, count_lower, count_upper, find_bucket, magnitude_of
from ..arithmetic.tile import TileMerge
from ..distributed import World
from ..threads import Scratch, in_threads
from .blocks import Block, base_first, blocks_of, read_base
from .plan import MergePlan


__all__ = ["PASSES", "find_thresholds"]

# How often the agents' changes are read.
PASSES = 2

# For every agent the bucket of the upper half and the rank in it; `None` if everything is kept.
_Places = list[tuple[int, int] | None]
# Of some agents: the position, the buckets in which there is something, and how much.
_Found = list[tuple[int, np.ndarray, np.ndarray]]


def find_thresholds(
    plan: MergePlan, names: Sequence[str], total: int, how: TileMerge, world: World, advance: Callable[[int], None]
) -> dict[str, list[float]]:
    """Thresholds for some tensors. All ranks call it.

    Args:
        plan ([`~ram_trl.merging.plan.MergePlan`]):
            The merge, by a method that trims.
        names (`Sequence[str]`):
            The rank's share of the tensors.
        total (`int`):
            Parameters of the model, tied ones once.
        how ([`~ram_trl.arithmetic.tile.TileMerge`]):
            How to merge.
        world ([`~ram_trl.distributed.World`]):
            The processes that merge together.
        advance (`Callable[[int], None]`):
            Called with the bytes of every block that is done, `PASSES` times for each.

    Returns:
        `dict[str, list[float]]`: for each of the tensors, by the position of the agent: the k-th largest magnitude,
        k = density * parameters, at least 1; 0 where fewer than k are not 0.

    Raises:
        NonFiniteError: if an agent holds NaN or infinity.
    """

    num_agents, per_tensor = len(plan.agents), bool(how.options["per_tensor"])

    def rank_in(numel: int) -> int:
        return max(1, int(how.options["density"] * numel))

    def count_all(places: _Places | None) -> np.ndarray:
        """Histograms over all of the tensors and ranks."""
        everywhere = None if places is None else dict.fromkeys(names, places)
        counts = world.run(lambda: _sum(num_agents, _count(plan, names, how, everywhere, advance)))
        return np.array(world.sum_counts(counts.ravel().tolist()), np.int64).reshape(counts.shape)

    def count_each(places: Mapping[str, _Places] | None) -> Iterator[tuple[str, np.ndarray]]:
        """Histograms of each tensor, one after another."""
        found = _count(plan, names, how, places, advance)
        for name, blocks in itertools.groupby(found, key=lambda pair: pair[0].name):
            yield name, _sum(num_agents, blocks)

    def select_each() -> dict[str, list[float]]:
        numels = {name: plan.base.tensors[name].numel for name in names}
        places = {name: _places(counts, rank_in(numels[name])) for name, counts in count_each(None)}
        return {name: _thresholds(places[name], counts) for name, counts in count_each(places)}

    if how.options["density"] == 1.0:
        return dict.fromkeys(names, [0.0] * num_agents)
    if per_tensor:
        return world.run(select_each)
    places = _places(count_all(None), rank_in(total))
    return dict.fromkeys(names, _thresholds(places, count_all(places)))


def _places(counts: np.ndarray, rank: int) -> _Places:
    return [find_bucket(own, rank) for own in counts]


def _thresholds(places: _Places, counts: np.ndarray) -> list[float]:
    return [_threshold(place, own) for place, own in zip(places, counts, strict=True)]


def _threshold(place: tuple[int, int] | None, lowers: np.ndarray) -> float:
    if place is None:
        return 0.0
    upper, rank = place
    lower, _ = find_bucket(lowers, rank)
    return magnitude_of(upper, lower)


def _sum(num_agents: int, found: Iterator[tuple[Block, _Found]]) -> np.ndarray:
    """Histograms of every agent over some blocks: int64, (agents, `BUCKETS`)."""
    total = np.zeros((num_agents, BUCKETS), np.int64)
    for _, parts in found:
        for position, buckets, numbers in parts:
            total[position, buckets] += numbers
    return total


def _count(
    plan: MergePlan,
    names: Sequence[str],
    how: TileMerge,
    places: Mapping[str, _Places] | None,
    advance: Callable[[int], None],
) -> Iterator[tuple[Block, _Found]]:
    """Counts of the upper halves in every block of some tensors, or of the lower ones where `places` says."""
    scratch, trimmed_from = Scratch(), METHODS[how.method].trimmed_from

    def count(block: Block) -> _Found:
        found: _Found = []
        touched_by = plan.touched_by.get(block.name, ())
        if not touched_by:
            return found
        base = read_base(plan, block, scratch)
        for start, stop in block.tiles():
            tile, context = base[start - block.start : stop - block.start], how.context(block.name, start)
            for position in touched_by:
                place = None if places is None else places[block.name][position]
                if places is not None and place is None:
                    continue
                with base_first(plan, block.name):
                    update = plan.vectors[position].update(position, block.name, start, tile)
                    if update is None:
                        continue
                    # the second time the same bytes are read
                    if places is None and not is_finite(update.delta):
                        raise plan.vectors[position].diverged(block.name)
                counts = scratch.take(8 * BUCKETS, "counts").view(np.int64)
                counts.fill(0)
                values = trimmed_from(update, context)
                if place is None:
                    count_upper(values, counts)
                else:
                    count_lower(values, place[0], counts)
                buckets = np.flatnonzero(counts)
                found.append((position, buckets, counts[buckets]))
        return found

    with contextlib.closing(in_threads(count, blocks_of(plan, names))) as results:
        for block, found in results:
            yield block, found
            advance(block.nbytes)
