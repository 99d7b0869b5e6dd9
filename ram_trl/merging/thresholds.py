"""The smallest magnitude that a trimming method keeps of each agent, by two passes over the agents' changes.

The selection is exact (`arithmetic/selection.py`) and streams like everything else. Over the whole model the counts
are summed over the ranks; of a single tensor a rank counts its own.
"""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial

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

    def select(group: Sequence[str], numel: int, add_up: Callable[[Callable], np.ndarray]) -> list[float]:
        rank = max(1, int(how.options["density"] * numel))
        places = [find_bucket(counts, rank) for counts in add_up(partial(_count, plan, group, how, None, advance))]
        lowers = add_up(partial(_count, plan, group, how, places, advance))
        return [_threshold(place, counts) for place, counts in zip(places, lowers, strict=True)]

    def over_ranks(count: Callable[[], np.ndarray]) -> np.ndarray:
        counts = world.run(count)
        return np.array(world.sum_counts(counts.ravel().tolist()), np.int64).reshape(counts.shape)

    if how.options["density"] == 1.0:
        return dict.fromkeys(names, [0.0] * len(plan.agents))
    if how.options["per_tensor"]:
        numels = {name: plan.base.tensors[name].numel for name in names}
        return world.run(
            lambda: {name: select([name], numel, lambda count: count()) for name, numel in numels.items()}
        )
    return dict.fromkeys(names, select(names, total, over_ranks))


def _threshold(place: tuple[int, int] | None, lowers: np.ndarray) -> float:
    if place is None:
        return 0.0
    upper, rank = place
    lower, _ = find_bucket(lowers, rank)
    return magnitude_of(upper, lower)


def _count(
    plan: MergePlan, names: Sequence[str], how: TileMerge, places: _Places | None, advance: Callable[[int], None]
) -> np.ndarray:
    """Histograms of every agent over some tensors, of upper halves or of lower ones: int64, (agents, `BUCKETS`)."""
    scratch, trimmed_from = Scratch(), METHODS[how.method].trimmed_from

    def count(block: Block) -> np.ndarray:
        counts = np.zeros((len(plan.agents), BUCKETS), np.int64)
        touched_by = plan.touched_by.get(block.name, ())
        if not touched_by:
            return counts
        base = read_base(plan, block, scratch)
        for start, stop in block.tiles():
            tile, context = base[start - block.start : stop - block.start], how.context(block.name, start)
            for position in touched_by:
                if places is not None and places[position] is None:
                    continue
                with base_first(plan, block.name):
                    update = plan.vectors[position].update(position, block.name, start, tile)
                    if update is None:
                        continue
                    if not is_finite(update.delta):
                        raise plan.vectors[position].diverged(block.name)
                values = trimmed_from(update, context)
                counts[position] += count_upper(values) if places is None else count_lower(values, places[position][0])
        return counts

    total = np.zeros((len(plan.agents), BUCKETS), np.int64)
    with contextlib.closing(in_threads(count, blocks_of(plan, names))) as results:
        for block, counts in results:
            total += counts
            advance(block.nbytes)
    return total
