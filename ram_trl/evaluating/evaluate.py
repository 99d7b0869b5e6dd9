"""Evaluating the base, its agents and what they were merged into, on several tasks, in one loaded model.

Every row of the table is put in the place of the base and taken back afterwards, bit for bit, so that one model is in
memory and none is written to disk. What is finished is kept: a second call with the same settings goes on from there.
"""

import contextlib
import functools
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..distributed import SINGLE, World
from ..errors import ConfigError
from ..progress import Progress
from ..storage.checkpoint import Checkpoint
from ..storage.durable import staging_dir
from ..storage.registry import AgentRegistry
from .benchmark import BenchmarkEvaluation
from .generation import TransformersGenerator
from .report import build_evaluation, markdown_evaluation
from .reward import RewardEvaluation
from .rows import Row, make_rows
from .store import Evaluation, Store, write_text
from .tasks import RewardTask, Task
from .vllm_generation import check_vllm, vllm_generator


__all__ = ["evaluate_models"]

logger = logging.getLogger(__name__)

_DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def evaluate_models(
    registry: AgentRegistry | str,
    tasks: Sequence[Task],
    output_dir: str,
    *,
    agents: Sequence[str] | None = None,
    merges: Mapping[str, Mapping[str, Any]] | None = None,
    merged: Sequence[str] = (),
    base_model: str | None = None,
    dtype: str = "auto",
    device_map: str | None = None,
    batch_size: int = 16,
    seed: int = 0,
    backend: str = "transformers",
    num_gpus: int = 1,
    world: World = SINGLE,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Evaluate the base, agents and merged models. All ranks call it, each with a model of its own.

    Args:
        registry ([`AgentRegistry`] or `str`):
            The registry.
        tasks (`Sequence[Task]`):
            Tasks, from [`~ram_trl.evaluating.tasks.read_tasks`].
        output_dir (`str`):
            Directory for `evaluation.json`, `evaluation.md` and what is finished; it may hold an evaluation to go on
            with.
        agents (`Sequence[str]`, *optional*):
            Agents, `"math"` or `"math@v2"`; by default the latest version of every agent.
        merges (`Mapping[str, Mapping]`, *optional*):
            Merges of these agents to evaluate in place: settings of [`apply_merge`] by the name of their row.
        merged (`Sequence[str]`, *optional*):
            Directories of merged models.
        base_model (`str`, *optional*):
            Where the base model is now, if not where it was.
        dtype (`str`, *optional*, defaults to `"auto"`):
            Dtype of the model in memory; `"auto"` is the base's.
        device_map (`str`, *optional*):
            `"auto"` spreads a model over the GPUs of one process; by default each process has it on its own device.
        batch_size (`int`, *optional*, defaults to `16`):
            Completions, or questions, at a time.
        seed (`int`, *optional*, defaults to `0`):
            Seed of sampling and of the choice of examples.
        backend (`str`, *optional*, defaults to `"transformers"`):
            `"transformers"` or `"vllm"`. vLLM completes prompts in one process, with each row in turn as a directory
            beside the results, which is removed afterwards.
        num_gpus (`int`, *optional*, defaults to `1`):
            With vLLM, GPUs that share a model.
        world ([`~ram_trl.distributed.World`], *optional*):
            The processes that evaluate together.
        progress (`Callable`, *optional*):
            Called on rank 0 with what is being done, the completions done and those to do.

    Returns:
        `dict`: the content of `evaluation.json`, on every rank.

    Raises:
        RamTrlError: naming what is wrong and the cure; what was finished is kept.
    """
    registry, root = AgentRegistry(registry), Path(output_dir)

    def prepare() -> tuple[list[Row], Checkpoint, list[Evaluation]]:
        _check_options(tasks, dtype, device_map, batch_size, world)
        if backend != "transformers":
            _check_backend(backend, tasks, device_map, world)
        rows, base = make_rows(registry, agents, merges or {}, merged, base_model)
        known = {row.agent for row in rows if row.agent}
        for task in tasks:
            if task.agent is not None and task.agent not in known:
                raise ConfigError(
                    f"task {task.name} belongs to agent {task.agent!r}, which is not evaluated; there are: "
                    f"{', '.join(sorted(known))}"
                )
        evaluations = [
            RewardEvaluation(task, seed) if isinstance(task, RewardTask) else BenchmarkEvaluation(task, seed)
            for task in tasks
        ]
        return rows, base, evaluations

    rows, base, evaluations = world.run(prepare)
    store = Store(root, f"{dtype}/{backend}")
    world.run_on_main(store.open)
    run = _Run(partial(_load, base, dtype, device_map, world), store, batch_size, world, progress)
    for row in rows:
        if backend == "vllm":
            run.measure_with_vllm(row, evaluations, root, dtype, num_gpus)
        else:
            run.measure(row, evaluations)

    def report() -> dict[str, Any]:
        results = {row.name: {task.task.name: store.load(row, task) for task in evaluations} for row in rows}
        content = build_evaluation(rows, tasks, results, {"dtype": dtype, "seed": seed, "base_model": base.name})
        write_text(root / "evaluation.json", json.dumps(content, indent=2, allow_nan=False) + "\n")
        write_text(root / "evaluation.md", markdown_evaluation(content))
        return content

    return world.run_on_main(report)


class _Run:
    """Measures rows, one after the other, in a model that is loaded when it is needed.

    Args:
        load (`Callable`):
            Loads the base and its tokenizer.
        store ([`~ram_trl.evaluating.store.Store`]):
            What is finished.
        batch_size (`int`):
            Completions, or questions, at a time.
        world ([`~ram_trl.distributed.World`]):
            The processes that evaluate together.
        progress (`Callable`, *optional*):
            Called on rank 0.
    """

    def __init__(
        self,
        load: Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]],
        store: Store,
        batch_size: int,
        world: World,
        progress: Progress | None,
    ):
        self._load, self._store, self._batch_size = functools.cache(load), store, batch_size
        self._world, self._progress = world, progress if world.is_main else None

    def measure(self, row: Row, evaluations: Sequence[Evaluation]) -> None:
        """Measure what is not finished of a row, and keep it."""
        world, todo = self._world, self._unfinished(row, evaluations)
        if not todo:
            return
        model, tokenizer = world.run(self._load)
        with contextlib.ExitStack() as stack:
            world.run(lambda: stack.enter_context(row.apply(model)))
            for evaluation in todo:
                started = time.monotonic()
                if isinstance(evaluation, BenchmarkEvaluation):
                    metrics, records = evaluation.run(model, tokenizer, self._batch_size, world)
                else:
                    generator = world.run(lambda: TransformersGenerator(model, tokenizer, self._batch_size))
                    metrics, records = evaluation.run(generator, world, self._meter(row))
                seconds = round(time.monotonic() - started, 1)
                world.run_on_main(partial(self._store.save, row, evaluation, metrics, records, seconds))

    def measure_with_vllm(
        self, row: Row, evaluations: Sequence[RewardEvaluation], root: Path, dtype: str, num_gpus: int
    ) -> None:
        """The same with vLLM, in one process."""
        todo = self._unfinished(row, evaluations)
        if not todo:
            return
        with staging_dir(root) as folder, vllm_generator(row.write(folder / "model"), dtype, num_gpus) as generator:
            for evaluation in todo:
                started = time.monotonic()
                metrics, records = evaluation.run(generator, self._world, self._meter(row))
                self._store.save(row, evaluation, metrics, records, round(time.monotonic() - started, 1))

    def _unfinished(self, row: Row, evaluations: Sequence[Evaluation]) -> list[Evaluation]:
        is_done = self._world.run_on_main(lambda: [self._store.load(row, task) is not None for task in evaluations])
        return [evaluation for evaluation, done in zip(evaluations, is_done, strict=True) if not done]

    def _meter(self, row: Row) -> Progress | None:
        progress = self._progress
        return progress and (lambda task, done, total: progress(f"{row.name}: {task}", done, total))


def _load(
    base: Checkpoint, dtype: str, device_map: str | None, world: World
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = AutoTokenizer.from_pretrained(base.path)
    model = AutoModelForCausalLM.from_pretrained(base.path, dtype=_DTYPES[dtype], device_map=device_map)
    return (model if device_map else model.to(world.device)).eval(), tokenizer


def _check_options(tasks: Sequence[Task], dtype: str, device_map: str | None, batch_size: int, world: World) -> None:
    if not tasks:
        raise ConfigError("no task to evaluate")
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not one of {', '.join(_DTYPES)}")
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} must be at least 1")
    if device_map and world.size > 1:
        raise ConfigError(
            f"device_map={device_map!r} spreads the model over the GPUs of one process: start one process, or leave "
            "it out to have the model once on each GPU"
        )


def _check_backend(backend: str, tasks: Sequence[Task], device_map: str | None, world: World) -> None:
    if backend != "vllm":
        raise ConfigError(f"backend={backend!r} is not one of transformers, vllm")
    if world.size > 1 or device_map:
        raise ConfigError("vLLM spreads a model over GPUs by itself: start one process, without device_map")
    if benchmarks := [task.name for task in tasks if not isinstance(task, RewardTask)]:
        raise ConfigError(f"task {benchmarks[0]} is a benchmark, which runs with --backend transformers")
    check_vllm()
