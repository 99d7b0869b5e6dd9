"""Comparing registered agents: one streaming pass over what they changed, and what follows from it.

The base is checked as it is read, and memory is bounded by threads and agents, as in a merge. Nothing of a model is
loaded.
"""

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..arithmetic.codec import is_finite
from ..arithmetic.defaults import DEFAULT_EPSILON
from ..arithmetic.ram import OverlapCounts, TileUpdate, overlap_ratio, rescale_factor
from ..arithmetic.tile import Finiteness, TileMerge, merge_tile_compiled, merge_tile_eager
from ..errors import NonFiniteError
from ..merging.blocks import Block, base_first, blocks_of, read_base
from ..merging.passes import probe_tensors
from ..merging.plan import MergePlan, MergeSettings, plan_merge
from ..progress import Progress, meter
from ..storage.base_model import BaseDigests
from ..storage.durable import check_output_dir, output_dir_stage
from ..storage.registry import AgentRegistry
from ..storage.tensor_file import digest_piece
from ..threads import Scratch, in_threads
from .findings import add_findings
from .statistics import Statistics, Yardstick, measure_tile
from .summary import summarise


__all__ = ["analyze_agents"]

logger = logging.getLogger(__name__)

# Steps of half a decade; the last is far beyond any change that training makes.
_FIRST_STEP, _LAST_STEP = 1e-7, 1e3


def analyze_agents(
    registry: AgentRegistry | str,
    output_dir: str | None = None,
    *,
    agents: Sequence[str] | None = None,
    r: float = 0.1,
    alpha: float = 2.0,
    epsilon: float = DEFAULT_EPSILON,
    base_model: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compare registered agents: density, overlaps, agreement, magnitudes, thresholds, and what RAM+ would do.

    Args:
        registry ([`AgentRegistry`] or `str`):
            The registry.
        output_dir (`str`, *optional*):
            Directory to create, with `analysis.json`, pictures and a page; it must not exist or be empty. Without it
            nothing is written.
        agents (`Sequence[str]`, *optional*):
            Agents to compare, `"math"` or `"math@v2"`; by default the latest version of every agent.
        r (`float`, *optional*, defaults to `0.1`):
            Rescale strength of RAM+.
        alpha (`float`, *optional*, defaults to `2.0`):
            Bound on rho in RAM+.
        epsilon (`float`, *optional*, defaults to `1e-5`):
            A parameter counts as changed when it differs from the base by more than this (equation 1).
        base_model (`str`, *optional*):
            Where the base model is now, if not where it was.
        progress (`Callable`, *optional*):
            Called with what is being done, the bytes done and the bytes to do.

    Returns:
        `dict`: the content of `analysis.json`; docs/ANALYSIS.md describes it.

    Raises:
        RamTrlError: naming what is wrong and the cure; nothing was written then.
    """
    registry = AgentRegistry(registry)
    settings = MergeSettings(r=r, alpha=alpha, epsilon=epsilon)
    if output_dir is not None:
        check_output_dir(Path(output_dir))
        registry.check_outside(Path(output_dir))
    with contextlib.closing(plan_merge(registry, agents, settings, base_model)) as plan:
        counts, factors = _probe(plan, progress)
        yardstick = Yardstick(_grid(settings.epsilon), factors)
        total, changed_in = _measure(plan, yardstick, progress)
        plan.check_unchanged()
        data = summarise(plan, yardstick, total, changed_in, counts.total)
    add_findings(data)
    if output_dir is not None:
        # matplotlib is heavy, and not everybody has it
        from .report import write_analysis

        with output_dir_stage(Path(output_dir)) as staged:
            for note in write_analysis(data, staged):
                logger.warning(note)
    return data


def _probe(plan: MergePlan, progress: Progress | None) -> tuple[OverlapCounts, list[float]]:
    """Check the agents' files; overlap counts and rescale factors, which tell what RAM+ writes."""
    for agent, _ in in_threads(lambda agent: agent.verify(), plan.agents):
        logger.debug("%s is what was registered", agent)
    names = list(plan.copies_of)
    counts = probe_tensors(plan, names, meter("probe", plan.nbytes(names), progress))
    factors = [
        rescale_factor("ram_plus", overlap_ratio(shared, unique), r=plan.settings.r, alpha=plan.settings.alpha)
        for shared, unique in zip(counts.shared, counts.unique, strict=True)
    ]
    return counts, factors


def _grid(epsilon: float) -> list[float]:
    """Thresholds from a merge's own upwards, in steps of half a decade: times 3, times 10, times 30, ..."""
    start = max(epsilon, _FIRST_STEP)
    steps, grid = 0, [epsilon]
    while grid[-1] < _LAST_STEP:
        steps += 1
        # as decimal numbers: 3e-05, not 3.0000000000000004e-05
        grid.append(float(f"{start * 10.0 ** (steps // 2) * (3 if steps % 2 else 1):.6g}"))
    return grid


def _measure(
    plan: MergePlan, yardstick: Yardstick, progress: Progress | None
) -> tuple[Statistics, dict[str, list[int]]]:
    """The pass: statistics of the whole model, and for every changed tensor the active elements of every agent."""
    names = [name for name in plan.copies_of if name in plan.touched_by]
    scratch, checked = Scratch(), BaseDigests(plan.base, plan.records)

    how = TileMerge(
        method="ram_plus",
        epsilon=plan.settings.epsilon,
        factors=yardstick.factors,
        weights=plan.weights,
        rounding="nearest",
        seed=0,
        device=torch.device("cpu"),
    )

    def measure(block: Block) -> tuple[Statistics, bytes]:
        base = read_base(plan, block, scratch)
        statistics = Statistics.zeros(len(plan.agents), len(yardstick.epsilons))
        for start, stop in block.tiles():
            tile = base[start - block.start : stop - block.start]
            with base_first(plan, block.name):
                _measure_tile(plan, block.name, start, tile, how, yardstick, statistics)
        return statistics, digest_piece(base)

    total = Statistics.zeros(len(plan.agents), len(yardstick.epsilons))
    changed_in: dict[str, list[int]] = {}
    advance = meter("analyze", plan.nbytes(names), progress)
    # closed here: no thread goes on with files that are closed after a failure
    with contextlib.closing(in_threads(measure, blocks_of(plan, names))) as results:
        for block, (statistics, digest) in results:
            checked.add(block.name, digest)
            # in the order of the blocks, whichever thread did them: the same sums for any number of threads
            total.add(statistics)
            changed = changed_in.setdefault(block.name, [0] * len(plan.agents))
            changed[:] = [a + int(b) for a, b in zip(changed, statistics.active[0], strict=True)]
            advance(block.nbytes)
    return total, changed_in


def _measure_tile(
    plan: MergePlan,
    name: str,
    start: int,
    base: Tensor,
    how: TileMerge,
    yardstick: Yardstick,
    statistics: Statistics,
) -> None:
    """Add one tile, after merging it as a merge would, without keeping the result."""
    if not is_finite(base):
        raise NonFiniteError(f"the base holds NaN or infinity in tensor {name!r}: choose another base")
    updates = [plan.vectors[at].update(at, name, start, base) for at in plan.touched_by[name]]
    updates = [update for update in updates if update is not None]
    for update in updates:
        if not is_finite(update.delta):
            raise plan.vectors[update.agent].diverged(name)
    if not updates:
        return
    merged = torch.empty_like(base)
    if plan.is_compiled:
        tile = merge_tile_compiled(base, updates, how, name, start, merged)
    else:
        # which masks the deltas in place, and small ones are measured too
        copies = [TileUpdate(update.agent, update.value, update.delta.clone()) for update in updates]
        tile = merge_tile_eager(base, copies, how, name, start, merged)
    if tile.finiteness is not Finiteness.FINITE:
        raise NonFiniteError(f"merged by RAM+, tensor {name!r} has values beyond {merged.dtype}: lower r")
    for update, magnitudes in zip(updates, tile.magnitudes, strict=True):
        statistics.rescaled[:, update.agent] += magnitudes
    measure_tile(updates, base, merged, yardstick, statistics)
