"""What is counted and added up in one tile: pure functions of the agents' changes.

Counts are integers, sums of magnitudes are float64. numpy defines them, with masks as bitmaps, 64 elements in one
operation; the compiled loops (`_kernels_measure.h`) count the same, and add up in another order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from ..arithmetic import kernels
from ..arithmetic.masks import unpack_bits
from ..arithmetic.ram import TileUpdate


__all__ = ["ALL", "SHARED", "UNIQUE", "Statistics", "Yardstick", "measure_tile"]

# Rows of the magnitudes: of all changes, however small, and of those beyond epsilon that one or more agents made.
ALL, UNIQUE, SHARED = range(3)
# Elements that are measured at a time: few enough to stay in the processor's cache.
_SLICE = 1 << 16


@dataclass(frozen=True, slots=True)
class Yardstick:
    """What tiles are measured by.

    Args:
        epsilons (`Sequence[float]`):
            Thresholds of equation 1, ascending; the first is the one of the merge.
        factors (`Sequence[float]`):
            Rescale factor lambda of every agent.
    """

    epsilons: Sequence[float]
    factors: Sequence[float]


@dataclass(slots=True)
class Statistics:
    """Of N agents and L thresholds, in a part of the model.

    Args:
        moved (`np.ndarray`):
            int64 [N]: elements that an agent changed at all.
        active (`np.ndarray`):
            int64 [L, N]: elements that it changed by more than each epsilon (equation 1).
        unique (`np.ndarray`):
            int64 [L, N]: those of them that no other agent changed (section 4.1, c = 1).
        overlaps (`np.ndarray`):
            int64 [N, N]: `overlaps[t, k]` of agent t's active elements are active in exactly k others (figure 2).
        both (`np.ndarray`):
            int64 [N, N]: elements that are active in both of two agents.
        same_sign (`np.ndarray`):
            int64 [N, N]: those that both changed in the same direction.
        kept (`np.ndarray`):
            float64 [L, N]: sum of |delta| over the elements beyond each epsilon.
        l1 (`np.ndarray`):
            float64 [3, N]: sum of |delta| over all, unique and shared elements.
        squares (`np.ndarray`):
            float64 [3, N]: sum of delta^2 over the same.
        largest (`np.ndarray`):
            float64 [3, N]: largest |delta| among the same.
        products (`np.ndarray`):
            float64 [N + 1, N + 1]: sums of products of the agents' deltas with each other, and, in the last row and
            column, with what a merge by RAM+ adds to the base.
        rescaled (`np.ndarray`):
            float64 [2, N]: magnitude of the unique changes as merged, and in the agent
            ([`~ram_trl.arithmetic.ram.unique_magnitudes`]).
    """

    moved: np.ndarray
    active: np.ndarray
    unique: np.ndarray
    overlaps: np.ndarray
    both: np.ndarray
    same_sign: np.ndarray
    kept: np.ndarray
    l1: np.ndarray
    squares: np.ndarray
    largest: np.ndarray
    products: np.ndarray
    rescaled: np.ndarray

    @classmethod
    def zeros(cls, num_agents: int, num_epsilons: int) -> "Statistics":
        n, levels = num_agents, num_epsilons
        integers = [(n,), (levels, n), (levels, n), (n, n), (n, n), (n, n)]
        floats = [(levels, n), (3, n), (3, n), (3, n), (n + 1, n + 1), (2, n)]
        return cls(*(np.zeros(shape, np.int64) for shape in integers), *(np.zeros(shape) for shape in floats))

    def add(self, other: "Statistics") -> None:
        """Add those of another part of the model. Sums depend, in their last places, on the order of parts."""
        for field in fields(self):
            own, others = getattr(self, field.name), getattr(other, field.name)
            (np.maximum if field.name == "largest" else np.add)(own, others, out=own)


def measure_tile(
    updates: Sequence[TileUpdate], base: Tensor, merged: Tensor, yardstick: Yardstick, statistics: Statistics
) -> None:
    """Measure one tile.

    Args:
        updates (`Sequence[TileUpdate]`):
            All finite changes of the agents that touch this tile, at least one, without masks.
        base (`Tensor`):
            Parameters of the base model, flat.
        merged (`Tensor`):
            The tile as RAM+ merges it, flat.
        yardstick ([`Yardstick`]):
            What to measure by.
        statistics ([`Statistics`]):
            Statistics to add to, in place.
    """
    at = [update.agent for update in updates]
    if kernels.compiled:
        applied = merged.float() - base.float()
        _measure_compiled([*(update.delta for update in updates), applied], at, yardstick.epsilons, statistics)
        return
    for start in range(0, len(base), _SLICE):
        part = slice(start, start + _SLICE)
        deltas = np.stack([update.delta[part].numpy() for update in updates])
        applied = (merged[part].float() - base[part].float()).numpy()
        sizes = np.abs(deltas)
        levels, unique, shared = _count(deltas, sizes, at, yardstick.epsilons, statistics)
        _add_up(sizes, levels, unique, shared, at, statistics)
        rows = torch.from_numpy(np.concatenate([deltas, applied[None]])).double()
        places = np.ix_([*at, -1], [*at, -1])
        statistics.products[places] += (rows @ rows.T).numpy()


def _measure_compiled(
    deltas: Sequence[Tensor], at: list[int], epsilons: Sequence[float], statistics: Statistics
) -> None:
    """The same by the compiled loops; the last of the deltas is what a merge adds."""
    n, levels = len(at), len(epsilons)
    integers, bins = np.zeros((1 + 2 * levels + 3 * n, n), np.int64), 2 * (levels + 1)
    sums = np.zeros((2 * bins + 3) * n + (n + 1) ** 2)
    thresholds = np.array(epsilons, np.float32)
    kernels.compiled.measure([delta.numpy() for delta in deltas], thresholds, integers, sums)
    counts = np.split(integers, np.cumsum([1, levels, levels, n, n]))
    statistics.moved[at] += counts[0][0]
    statistics.active[:, at] += counts[1]
    statistics.unique[:, at] += counts[2]
    statistics.overlaps[at, :n] += counts[3]
    statistics.both[np.ix_(at, at)] += counts[4]
    statistics.same_sign[np.ix_(at, at)] += counts[5]
    rows, products = sums[: -((n + 1) ** 2)].reshape(-1, n), sums[-((n + 1) ** 2) :]
    for i, t in enumerate(at):
        _add_bins(*rows[: 2 * bins, i].reshape(2, 2, -1), t, statistics)
    statistics.largest[:, at] = np.maximum(statistics.largest[:, at], rows[2 * bins :])
    statistics.products[np.ix_([*at, -1], [*at, -1])] += products.reshape(n + 1, n + 1)


def _count(
    deltas: np.ndarray, sizes: np.ndarray, at: list[int], epsilons: Sequence[float], statistics: Statistics
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Everything that is counted but [`Statistics.moved`].

    Returns:
        For every agent and element how many of the thresholds the change is beyond, and whether it is unique or shared
        by the first of them: uint8, bool and bool [agents, elements].
    """
    levels = np.zeros(sizes.shape, np.uint8)
    for level, epsilon in enumerate(epsilons):
        beyond = sizes > epsilon
        if level and not beyond.any():
            break
        levels += beyond.view(np.uint8)
        masks = _words(beyond)
        changed_by = _changed_by_at_least(masks)
        alone = masks & ~changed_by[1]
        statistics.active[level, at] += _ones(masks)
        statistics.unique[level, at] += _ones(alone)
        if level == 0:
            _count_overlaps(masks, changed_by, _words(deltas > 0), at, statistics)
            parts = [unpack_bits(words.view(np.uint8).ravel(), 64 * words.size) for words in (alone, masks & ~alone)]
    return levels, *(part.reshape(len(at), -1)[:, : sizes.shape[1]] for part in parts)


def _count_overlaps(
    masks: np.ndarray, changed_by: np.ndarray, rising: np.ndarray, at: list[int], statistics: Statistics
) -> None:
    for i, row in enumerate(at):
        at_least = _ones(masks[i] & changed_by)
        at_least[:-1] -= at_least[1:]
        statistics.overlaps[row, : len(at)] += at_least[: len(at)]
        both = masks[i] & masks
        statistics.both[row, at] += _ones(both)
        statistics.same_sign[row, at] += _ones(both & ~(rising[i] ^ rising))


def _add_up(
    sizes: np.ndarray,
    levels: np.ndarray,
    unique: np.ndarray,
    shared: np.ndarray,
    at: list[int],
    statistics: Statistics,
) -> None:
    """Everything that is summed, but products."""
    bits, num_levels = sizes.view(np.int32), len(statistics.active)
    masks = {UNIQUE: unique, SHARED: shared}
    for i, t in enumerate(at):
        moved = np.flatnonzero(sizes[i])
        # a bin for every number of thresholds, once more for unique elements: all sums with one reading
        bins = (levels[i] + np.uint8(num_levels + 1) * unique[i])[moved].astype(np.intp)
        size = sizes[i][moved].astype(np.float64)
        l1, squares = (
            np.bincount(bins, weights, 2 * (num_levels + 1)).reshape(2, -1) for weights in (size, size * size)
        )
        _add_bins(l1, squares, t, statistics)
        statistics.moved[t] += len(moved)
        statistics.largest[ALL, t] = max(statistics.largest[ALL, t], sizes[i].max())
        for row, mask in masks.items():
            # positive floats are in the order of their bits
            largest = (bits[i] & -mask[i].astype(np.int32)).max().view(np.float32)
            statistics.largest[row, t] = max(statistics.largest[row, t], largest)


def _add_bins(l1: np.ndarray, squares: np.ndarray, t: int, statistics: Statistics) -> None:
    """Adds sums of one agent: [not unique, unique] by the number of thresholds that an element is beyond."""
    for sums, total in ((l1, statistics.l1), (squares, statistics.squares)):
        total[:, t] += sums.sum(), sums[1].sum(), sums[0, 1:].sum()
    # beyond a level is what is in the bins above it
    statistics.kept[:, t] += l1.sum(axis=0)[:0:-1].cumsum()[::-1]


def _changed_by_at_least(masks: np.ndarray) -> np.ndarray:
    """Bitmaps of the elements that at least 1, 2, ... agents changed; two of them at least."""
    changed_by = np.zeros((max(2, len(masks)), masks.shape[1]), np.uint64)
    for mask in masks:
        for k in reversed(range(1, len(changed_by))):
            changed_by[k] |= changed_by[k - 1] & mask
        changed_by[0] |= mask
    return changed_by


def _words(masks: np.ndarray) -> np.ndarray:
    """bool [rows, elements] -> bitmaps, uint64 [rows, words], with zeros at their ends."""
    bitmaps = np.packbits(masks, axis=1, bitorder="little")
    words = np.zeros((len(masks), -(-masks.shape[1] // 64)), np.uint64)
    words.view(np.uint8)[:, : bitmaps.shape[1]] = bitmaps
    return words


def _ones(words: np.ndarray) -> np.ndarray:
    """Number of ones in every row."""
    return np.bitwise_count(words).sum(axis=1, dtype=np.int64)
