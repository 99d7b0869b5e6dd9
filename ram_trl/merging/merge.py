"""Merging registered agents: plan, verify, probe, rescale, merge, publish.

Every step is taken by all ranks together; a rank that fails is heard by the others before anything is published.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from ..arithmetic import kernels
from ..arithmetic.defaults import DEFAULT_EPSILON
from ..arithmetic.methods import METHODS
from ..arithmetic.ram import OverlapCounts, overlap_ratio
from ..arithmetic.tile import TileMerge
from ..distributed import SINGLE, World
from ..progress import Progress, meter
from ..storage.checkpoint import CheckpointWriter, TensorWriter, copy_model_files, parse_size, plan_shards
from ..storage.durable import check_output_dir, output_dir_stage, write_json, write_text
from ..storage.fisher import StoredFisher
from ..storage.registry import AgentRegistry, RegisteredAgent
from ..storage.tensor_file import TensorFile
from ..threads import in_threads
from .model_card import model_card
from .passes import merge_tensors, probe_tensors
from .plan import MergePlan, MergeSettings, plan_merge, plan_together
from .report import build_report
from .thresholds import PASSES, find_thresholds


__all__ = ["merge_agents", "run_merge", "run_passes"]

logger = logging.getLogger(__name__)


def merge_agents(
    registry: AgentRegistry | str,
    output_dir: str | None,
    *,
    agents: Sequence[str] | None = None,
    method: str = "ram_plus",
    method_options: Mapping[str, float] | None = None,
    r: float = 0.1,
    alpha: float = 2.0,
    epsilon: float = DEFAULT_EPSILON,
    weights: Mapping[str, float] | None = None,
    output_dtype: str = "auto",
    rounding: str = "nearest",
    seed: int = 0,
    engine: str = "auto",
    max_shard_size: str = "5GB",
    base_model: str | None = None,
    world: World = SINGLE,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Merge registered agents into one model directory.

    Args:
        registry ([`AgentRegistry`] or `str`):
            The registry.
        output_dir (`str`, *optional*):
            Directory to create; it must not exist or be empty. Without it the agents are probed and nothing is
            written.
        agents (`Sequence[str]`, *optional*):
            Agents to merge, `"math"`, `"math@v2"` or `"math@best"`; by default the latest version of every agent.
        method (`str`, *optional*, defaults to `"ram_plus"`):
            `"ram_plus"` (equation 6), `"ram"` (no rescaling), `"ram_plus_soft"` (appendix E), or another one of
            [`~ram_trl.arithmetic.methods.METHODS`].
        method_options (`Mapping[str, float]`, *optional*):
            Options of the method beside r and alpha, like `{"density": 0.1}` of `"ties"`.
        r (`float`, *optional*, defaults to `0.1`):
            Rescale strength of RAM's methods.
        alpha (`float`, *optional*, defaults to `2.0`):
            Bound on rho in their rescale factor.
        epsilon (`float`, *optional*, defaults to `1e-5`):
            A parameter counts as changed when it differs from the base by more than this.
        weights (`Mapping[str, float]`, *optional*):
            Weight of agents, 1 by default.
        output_dtype (`str`, *optional*, defaults to `"auto"`):
            Dtype of the merged weights; `"auto"` is the base's.
        rounding (`str`, *optional*, defaults to `"nearest"`):
            `"nearest"` or `"stochastic"`.
        seed (`int`, *optional*, defaults to `0`):
            Seed of stochastic rounding, and of what a method does at random.
        engine (`str`, *optional*, defaults to `"auto"`):
            `"compiled"` (loops compiled for the CPU), `"eager"` (torch, on the GPU if there is one) or `"auto"`:
            compiled where the installation has them and the method is RAM's or a sum of the changes (average,
            task_arithmetic, interpolation). The bytes are the same.
        max_shard_size (`str`, *optional*, defaults to `"5GB"`):
            Largest size of a weight file.
        base_model (`str`, *optional*):
            Where the base model is now, if not where it was.
        world ([`~ram_trl.distributed.World`], *optional*):
            The processes that merge together.
        progress (`Callable`, *optional*):
            Called on rank 0 with what is being done, the bytes done and the bytes to do.

    Returns:
        `dict`: the content of `merge_report.json`.

    Raises:
        RamTrlError: naming what is wrong and the cure; nothing was written then.
    """
    registry = AgentRegistry(registry)

    def make_plan() -> MergePlan:
        settings = MergeSettings(
            method=method,
            method_options=method_options or {},
            r=r,
            alpha=alpha,
            epsilon=epsilon,
            weights=weights or {},
            output_dtype=output_dtype,
            rounding=rounding,
            seed=seed,
            engine=engine,
        )
        parse_size(max_shard_size)
        if output_dir is not None:
            check_output_dir(Path(output_dir))
            registry.check_outside(Path(output_dir))
        return plan_merge(registry, agents, settings, base_model)

    plan = plan_together(make_plan, world)
    if output_dir is None:
        with contextlib.closing(plan):
            return _probe(plan, world, progress)[0]
    target = Path(output_dir)
    return run_merge(
        plan, partial(output_dir_stage, target), target.absolute().name, max_shard_size, world=world, progress=progress
    )


def run_merge(
    plan: MergePlan,
    stage: Callable[[], AbstractContextManager[Path]],
    title: str,
    max_shard_size: str,
    *,
    world: World,
    progress: Progress | None,
) -> dict[str, Any]:
    """Carry a plan out. All ranks call it.

    Args:
        plan ([`~ram_trl.merging.plan.MergePlan`]):
            The plan, closed at the end.
        stage (`Callable`):
            Gives a context manager, entered on rank 0 alone, of a directory to write the model in. It publishes the
            directory when it is left without an error.
        title (`str`):
            Name of the model in its card.
        max_shard_size (`str`):
            Largest size of a weight file.
        world ([`~ram_trl.distributed.World`]):
            The processes that merge together.
        progress (`Callable`, *optional*):
            Called on rank 0 with what is being done, the bytes done and the bytes to do.

    Returns:
        `dict`: the content of `merge_report.json`.
    """
    with contextlib.closing(plan), contextlib.ExitStack() as stack:
        staged = Path()

        def lay_out() -> CheckpointWriter:
            nonlocal staged
            staged = world.run_on_main(lambda: stack.enter_context(stage()))
            writer = CheckpointWriter(staged, plan_shards(plan.outputs, parse_size(max_shard_size)))
            stack.callback(writer.close)
            world.run_on_main(writer.create)
            world.run(writer.open)
            return writer

        report = run_passes(plan, lay_out, world=world, progress=progress)
        world.run_on_main(lambda: _finish(plan, staged, report, title))
        # leaving the staged directory publishes it
        world.run_on_main(stack.close)
    return report


def run_passes(
    plan: MergePlan, make_writer: Callable[[], TensorWriter], *, world: World, progress: Progress | None
) -> dict[str, Any]:
    """Check the agents, probe, and merge into whatever writes. All ranks call it.

    Args:
        plan ([`~ram_trl.merging.plan.MergePlan`]):
            The plan; it stays open.
        make_writer (`Callable`):
            Called after the probe; gives what `write(name, start, values)` is called of, from several threads. It is
            closed at the end.
        world ([`~ram_trl.distributed.World`]):
            The processes that merge together.
        progress (`Callable`, *optional*):
            Called on rank 0 with what is being done, the bytes done and the bytes to do.

    Returns:
        `dict`: the content of `merge_report.json`.
    """
    _, counts, factors = _probe(plan, world, progress)
    names = plan.share(world.rank, world.size)
    how = _prepare(plan, names, counts.total, factors, world, progress)
    writer = make_writer()
    advance = meter("merge", plan.nbytes(names), progress if world.is_main else None)
    local = world.run(lambda: merge_tensors(plan, names, how, writer, advance))
    magnitudes = {name: pairs for part in world.gather(local) for name, pairs in part.items()}
    report = build_report(plan, counts, factors, magnitudes)
    world.run(plan.check_unchanged)
    writer.close()
    return report


def _probe(
    plan: MergePlan, world: World, progress: Progress | None
) -> tuple[dict[str, Any], OverlapCounts, list[float]]:
    """Check the agents, count overlaps over the whole model, and find the rescale factors."""
    settings, progress = plan.settings, progress if world.is_main else None
    world.run(lambda: _verify(plan.recorded[world.rank :: world.size], progress))
    names = plan.share(world.rank, world.size)
    advance = meter("probe", plan.nbytes(names), progress)
    local = world.run(lambda: probe_tensors(plan, names, advance))
    counts = OverlapCounts.from_list(world.sum_counts(local.to_list()), len(plan.agents))
    factors, method = [1.0] * len(plan.agents), METHODS[settings.method]
    if method.rescale:
        factors = [
            method.rescale(overlap_ratio(shared, unique), r=settings.r, alpha=settings.alpha)
            for shared, unique in zip(counts.shared, counts.unique, strict=True)
        ]
    report = build_report(plan, counts, factors)
    if world.is_main:
        if settings.engine == "auto" and kernels.compiled is None and method.is_compiled:
            logger.warning(
                "this installation has no compiled loops, torch merges in several times as long: install ram_trl "
                "again where there is a C compiler"
            )
        for warning in report["warnings"]:
            logger.warning(warning)
    return report, counts, factors


def _prepare(
    plan: MergePlan,
    names: Sequence[str],
    total: int,
    factors: Sequence[float],
    world: World,
    progress: Progress | None,
) -> TileMerge:
    """How to merge a tile, with what the method has to find out before."""
    settings = plan.settings
    how = TileMerge(
        method=settings.method,
        epsilon=settings.epsilon,
        factors=factors,
        weights=plan.weights,
        rounding=settings.rounding,
        seed=settings.seed,
        device=world.device,
        agents=[str(agent) for agent in plan.agents],
        options=settings.method_options,
    )
    if METHODS[settings.method].trimmed_from is None:
        return how
    advance = meter("trim", PASSES * plan.nbytes(names), progress if world.is_main else None)
    return dataclasses.replace(how, thresholds=find_thresholds(plan, names, total, how, world, advance))


def _verify(recorded: Sequence[RegisteredAgent | StoredFisher], progress: Progress | None) -> None:
    """Check the digests of some of the files that are to be read."""
    sizes = [sum(file.size for file in one.manifest.files.values()) for one in recorded]
    advance = meter("check", sum(sizes), progress)
    for (_, size), _ in in_threads(lambda pair: pair[0].verify(), zip(recorded, sizes, strict=True)):
        advance(size)


def _finish(plan: MergePlan, staged: Path, report: dict[str, Any], title: str) -> None:
    """Check what was written and add everything that is not a weight."""
    for path in staged.glob("*.safetensors"):
        TensorFile(path).close()
    copy_model_files(plan.base.path, staged, plan.outputs)
    write_json(staged / "merge_report.json", report)
    write_text(staged / "README.md", model_card(report, title))
