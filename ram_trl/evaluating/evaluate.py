"""Evaluating the base, its agents and what they were merged into, on several tasks, in one loaded model.

Every row of the table is put in the place of the base and taken back afterwards, bit for bit, so that one model is in
memory and none is written to disk. What is finished is kept: a second call with the same settings goes on from there.
"""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..distributed import SINGLE, World
from ..errors import ConfigError, NonFiniteError, RamTrlError, UnsupportedModelError
from ..progress import Progress
from ..storage.durable import staging_dir
from ..storage.registry import AgentRegistry
from ..version import __version__
from .benchmark import BenchmarkEvaluation
from .checks import DTYPES, check_options, check_owners, warn_of_rounding
from .generation import TransformersGenerator, explain_out_of_memory
from .perplexity import PerplexityEvaluation
from .report import build_evaluation, markdown_evaluation
from .reward import RewardEvaluation
from .rows import Row, check_names, find_agents, make_merge_rows, make_rows
from .store import Evaluation, Store, digest_model_files, write_text
from .tasks import PerplexityTask, RewardTask, Task
from .vllm_generation import vllm_generator


__all__ = ["Evaluator", "evaluate_models"]

logger = logging.getLogger(__name__)


def evaluate_models(
    registry: AgentRegistry | str,
    tasks: Sequence[Task],
    output_dir: str,
    *,
    merges: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
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
        merges (`Mapping[str, Mapping]`, *optional*):
            Merges of the agents to evaluate in place: settings of [`apply_merge`] by the name of their row.
        **options:
            `agents`, `merged`, `dtype`, `batch_size`, ...: see [`Evaluator`].

    Returns:
        `dict`: the content of `evaluation.json`, on every rank; see [`Evaluator.run`].

    Raises:
        RamTrlError: naming what is wrong and the cure; what was finished is kept.
    """
    return Evaluator(registry, tasks, output_dir, **options).run(merges or {})


class Evaluator:
    """Measures the base, agents, merged models and merges, in a model that stays loaded from call to call.

    All ranks make one and call it, each with a model of its own.

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
        merged (`Sequence[str]`, *optional*):
            Directories of merged models, `DIR` or `NAME=DIR`.
        base_model (`str`, *optional*):
            Where the base model is now, if not where it was.
        dtype (`str`, *optional*, defaults to `"auto"`):
            Dtype of the model in memory; `"auto"` is the base's.
        device_map (`str`, *optional*):
            `"auto"` spreads a model over the GPUs of one process; by default each process has it on its own device.
        batch_size (`int`, *optional*, defaults to `16`):
            Completions, questions or texts at a time.
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

    Raises:
        RamTrlError: naming what is wrong and the cure.
    """

    def __init__(
        self,
        registry: AgentRegistry | str,
        tasks: Sequence[Task],
        output_dir: str,
        *,
        agents: Sequence[str] | None = None,
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
    ):
        self._registry, self._tasks, self._root = AgentRegistry(registry), list(tasks), Path(output_dir)
        self._base_model, self._dtype, self._device_map = base_model, dtype, device_map
        self._batch_size, self._seed, self._backend, self._num_gpus = batch_size, seed, backend, num_gpus
        self._world, self._progress = world, progress if world.is_main else None
        self._loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None = None
        self._evaluations: list[Evaluation] = []
        self._merges: dict[str, Row] = {}
        self._results: dict[str, dict[str, dict[str, Any]]] = {}
        self._failed: dict[str, str] = {}
        # on every rank: rows that need nothing more, and whether the files show them all
        self._done: set[str] = set()
        self._is_shown = False

        # on all ranks the versions that rank 0 finds
        found = world.run_on_main(lambda: [str(agent) for agent in find_agents(self._registry, agents)])

        def look_up() -> None:
            check_options(self._tasks, dtype, device_map, batch_size, backend, world)
            self._rows, self._base = make_rows(self._registry, found, merged, base_model)
            check_owners(self._tasks, self._rows)
            how = {"dtype": dtype, "backend": backend, "batch_size": batch_size}
            self._settings = {"base_model": self._base.name, "seed": seed, **how}
            files = digest_model_files(self._base.path)
            # other kernels give other last places, and with them other completions
            how |= {"device": world.device.type, "torch": torch.__version__, "transformers": transformers.__version__}
            self._store = Store(self._root, {**how, "ram_trl": __version__, "files": files})

        world.run(look_up)

    def run(self, merges: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Any]:
        """Measure what is not finished. All ranks call it, with the same merges.

        `evaluation.json` and `evaluation.md` are written after every row. A merge that cannot be made is left out, and
        the others are measured.

        Args:
            merges (`Mapping[str, Mapping]`, *optional*):
                Merges of the agents to evaluate in place: settings of [`apply_merge`] by the name of their row. They
                come to those of earlier calls.

        Returns:
            `dict`: the content of `evaluation.json`, on every rank, of all rows up to now; under `"failed"` the merges
            that could not be made, by name, and why.

        Raises:
            RamTrlError: naming what is wrong and the cure; what was finished is kept.
        """
        self._world.run(lambda: self._prepare(merges or {}))
        self._world.run_on_main(self._store.open)
        # what could not be made is not tried again by every call
        for row in [row for row in self._all_rows() if row.name not in self._done]:
            if todo := self._unfinished(row):
                if self._backend == "vllm":
                    self._measure_with_vllm(row, todo)
                else:
                    self._measure(row, todo)
                self._world.run_on_main(self._write)
            self._done.add(row.name)
            self._is_shown = bool(todo)
        if not self._is_shown:
            self._world.run_on_main(self._write)
            self._is_shown = True
        return self._world.run_on_main(lambda: self._content)

    def _prepare(self, merges: Mapping[str, Mapping[str, Any]]) -> None:
        agents = [row.name for row in self._rows if row.kind == "agent"]
        rows = make_merge_rows(self._registry, agents, merges, self._base_model)
        for row in rows:
            if row.name in self._merges and self._merges[row.name].identity != row.identity:
                raise ConfigError(f"merge {row.name!r} was another one before: give it a name of its own")
        new = [row for row in rows if row.name not in self._merges]
        check_names([*self._all_rows(), *new])
        if not self._evaluations:
            self._evaluations = [_evaluation(task, self._seed) for task in self._tasks]
        self._merges.update({row.name: row for row in new})

    def _all_rows(self) -> list[Row]:
        """The base, agents, merges and directories, as they are shown."""
        directories = [row for row in self._rows if row.kind == "merged"]
        return [*(row for row in self._rows if row.kind != "merged"), *self._merges.values(), *directories]

    def _unfinished(self, row: Row) -> list[Evaluation]:
        def look() -> list[bool]:
            known = self._results.setdefault(row.name, {})
            for evaluation in self._evaluations:
                name = evaluation.task.name
                if name not in known and (kept := self._store.load(row, evaluation)) is not None:
                    known[name] = kept
            return [evaluation.task.name not in known for evaluation in self._evaluations]

        is_open = self._world.run_on_main(look)
        return [evaluation for evaluation, wanted in zip(self._evaluations, is_open, strict=True) if wanted]

    def _measure(self, row: Row, todo: Sequence[Evaluation]) -> None:
        world = self._world
        model, _ = world.run(self._load)
        warn_of_rounding(row, model.dtype, world)
        with contextlib.ExitStack() as stack:
            try:
                world.run(lambda: stack.enter_context(row.apply(model)))
            except Exception as error:
                # whatever it is: the other ranks know of it, and give the base back now
                self._give_back(stack)
                self._note_failure(row, error)
                return
            for evaluation in todo:
                self._keep(row, evaluation, partial(self._evaluate, row, evaluation))
            self._give_back(stack)

    def _evaluate(self, row: Row, evaluation: Evaluation) -> tuple[dict, list]:
        model, tokenizer = self._loaded
        if isinstance(evaluation, BenchmarkEvaluation):
            return evaluation.run(model, tokenizer, self._batch_size, self._world)
        if isinstance(evaluation, PerplexityEvaluation):
            return evaluation.run(model, tokenizer, self._batch_size, self._world, self._meter(row))
        generator = self._world.run(lambda: TransformersGenerator(model, tokenizer, self._batch_size))
        return evaluation.run(generator, self._world, self._meter(row))

    def _measure_with_vllm(self, row: Row, todo: Sequence[RewardEvaluation]) -> None:
        with staging_dir(self._root) as folder:
            try:
                directory = row.write(folder / "model")
            except RamTrlError as error:
                self._note_failure(row, error)
                return
            with vllm_generator(directory, self._dtype, self._num_gpus) as generator:
                for evaluation in todo:
                    run = partial(evaluation.run, generator, self._world, self._meter(row))
                    self._keep(row, evaluation, run)

    def _keep(self, row: Row, evaluation: Evaluation, measure: Callable[[], tuple[dict, list]]) -> None:
        """Measure a row on one task, and keep what came out."""
        started = time.monotonic()
        metrics, records = measure()
        seconds = round(time.monotonic() - started, 1)

        def keep() -> None:
            kept = self._store.save(row, evaluation, metrics, records, seconds)
            self._results[row.name][evaluation.task.name] = kept

        self._world.run_on_main(keep)

    def _give_back(self, stack: contextlib.ExitStack) -> None:
        """Make the model the base again, on all ranks or on none: where one cannot, the others must not go on."""
        try:
            self._world.run(stack.close)
        except Exception:
            self._loaded = None
            raise

    def _note_failure(self, row: Row, error: Exception) -> None:
        """Remember a merge that cannot be made. What lies in no merge, like a full disk, ends the evaluation."""
        is_of_merge = isinstance(error, NonFiniteError | UnsupportedModelError | ConfigError)
        if not all(self._world.gather(row.kind == "merged" and is_of_merge)):
            self._loaded = None
            raise error
        self._failed[row.name] = str(error)
        if self._world.is_main:
            logger.warning("%s cannot be evaluated: %s", row.name, error)

    def _write(self) -> None:
        rows = [row for row in self._all_rows() if len(self._results.get(row.name, ())) == len(self._tasks)]
        names = {row.name for row in rows}
        failed = {name: problem for name, problem in self._failed.items() if name not in names}
        self._content = build_evaluation(rows, self._tasks, self._results, self._settings, failed)
        text = json.dumps(self._content, indent=2, allow_nan=False, default=str)
        write_text(self._root / "evaluation.json", text + "\n")
        write_text(self._root / "evaluation.md", markdown_evaluation(self._content))

    def _load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        if self._loaded is None:
            path, options = self._base.path, {"dtype": DTYPES[self._dtype], "device_map": self._device_map}
            tokenizer = AutoTokenizer.from_pretrained(path)
            with explain_out_of_memory():
                model = AutoModelForCausalLM.from_pretrained(path, **options)
                self._loaded = (model if self._device_map else model.to(self._world.device)).eval(), tokenizer
        return self._loaded

    def _meter(self, row: Row) -> Progress | None:
        progress = self._progress
        return progress and (lambda task, done, total: progress(f"{row.name}: {task}", done, total))


def _evaluation(task: Task, seed: int) -> Evaluation:
    if isinstance(task, PerplexityTask):
        return PerplexityEvaluation(task)
    return RewardEvaluation(task, seed) if isinstance(task, RewardTask) else BenchmarkEvaluation(task, seed)
