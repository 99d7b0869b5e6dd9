"""Evaluation by benchmark: lm-evaluation-harness on the loaded model, the extra `ram_trl[eval]`."""

import functools
import importlib.metadata
import itertools
import json
import logging
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..distributed import World
from ..errors import ConfigError, DistributedError, RamTrlError
from ..storage.durable import digest_file
from .generation import explain_out_of_memory
from .statistics import Measurement
from .tasks import BenchmarkTask


__all__ = ["BenchmarkEvaluation"]


class BenchmarkEvaluation:
    """A task of lm-evaluation-harness.

    Args:
        task ([`~ram_trl.evaluating.tasks.BenchmarkTask`]):
            The task.
        seed (`int`):
            Seed of the choice of examples, and of sampling.

    Raises:
        ConfigError: if the harness is not installed or does not know the task.
    """

    def __init__(self, task: BenchmarkTask, seed: int):
        self.task, self._seed = task, seed
        self._manager = _task_manager(task)
        # changes with the harness, with what it has read of the task, and with the user's own files
        version, files = importlib.metadata.version("lm_eval"), _own_files(task.include_path)
        loaded = _load(task, self._manager)
        known = json.dumps([seed, version, files, _content(task, loaded)])
        self.fingerprint = blake3(known.encode()).hexdigest()
        self._built = {**loaded["tasks"], **loaded["groups"]}[task.benchmark]

    def run(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int, world: World
    ) -> tuple[dict[str, Measurement], list[dict[str, Any]]]:
        """Evaluate a model. All ranks call it; the harness gives each its share of the questions.

        Returns:
            `tuple[dict[str, Measurement], list[dict]]`: on every rank, by `METRIC,FILTER`; and, on rank 0, what the
            harness recorded of every question.
        """
        try:
            with explain_out_of_memory(batch_size):
                results = self._evaluate(model, tokenizer, batch_size, world)
        except _AnotherFailed:
            raise
        except Exception as error:
            failure = error if isinstance(error, RamTrlError) else _failure(self.task, error)
            world.agree(failure)
            raise failure from error
        world.agree(None)
        # prompts can be long: only what was measured goes to the other ranks
        measured = world.run_on_main(lambda: self._measurements(results))
        samples = [
            {"task": name, "prompt": _text(sample["arguments"]), "completion": _text(sample["filtered_resps"])}
            for name, group in (results["samples"].items() if world.is_main else ())
            for sample in group
        ]
        return measured, samples

    def _evaluate(self, model, tokenizer, batch_size: int, world: World) -> dict[str, Any] | None:
        from lm_eval import simple_evaluate

        task = self.task
        return simple_evaluate(
            model=_shared_model(model, tokenizer, batch_size, world),
            tasks=[self._built],
            task_manager=self._manager,
            num_fewshot=task.num_fewshot,
            limit=task.limit,
            apply_chat_template=task.apply_chat_template and tokenizer.chat_template is not None,
            gen_kwargs=task.gen_kwargs or None,
            confirm_run_unsafe_code=task.confirm_run_unsafe_code,
            log_samples=True,
            random_seed=self._seed,
            numpy_random_seed=self._seed,
            torch_random_seed=self._seed,
            fewshot_random_seed=self._seed,
        )

    def _measurements(self, results: dict[str, Any]) -> dict[str, Measurement]:
        task = self.task.benchmark
        values = {**results["results"], **results.get("groups", {})}[task]
        count = results["n-samples"].get(task, {}).get("effective", 0)
        directions = results["higher_is_better"].get(task, {})
        samples = sorted(results["samples"].get(task, []), key=lambda sample: sample["doc_id"])
        measured = {}
        for name, value in values.items():
            metric, sign, kind = name.partition(",")
            if not sign or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{metric}_stderr,{kind}")
            # a place for every question, also for those without a score: others are compared with them one by one
            given = [sample.get(metric) for sample in samples if sample["filter"] == kind]
            scores = [float(score) if _is_number(score) else None for score in given]
            known = [score for score in scores if score is not None]
            # of other aggregations than the mean the questions have no scores
            is_mean = known and math.isclose(math.fsum(known) / len(known), value, rel_tol=1e-9, abs_tol=1e-12)
            measured[name] = Measurement(
                scores=scores if is_mean else None,
                # a model that is broken has infinite ones
                mean=float(value) if _is_number(value) else None,
                stderr=float(stderr) if _is_number(stderr) else None,
                n=len(known) or count,
                # None where the tasks of a group differ
                higher_is_better=directions.get(metric) is not False,
            )
        return measured


def _task_manager(task: BenchmarkTask) -> Any:
    """The harness's index of tasks, of the user's directory alone if the task is there."""
    try:
        # the harness is an extra, and takes seconds to import
        import lm_eval.tasks  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"task {task.name} needs lm-evaluation-harness: pip install 'ram_trl[eval]' ({error})"
        ) from error
    # it warns that a loaded model would know nothing of other processes, which it is told below
    logging.getLogger("lm_eval.models.huggingface").setLevel(logging.ERROR)
    if task.include_path is not None and not Path(task.include_path).is_dir():
        raise ConfigError(f"task {task.name}: include_path={task.include_path!r} is not a directory")
    metadata = json.dumps(task.metadata, sort_keys=True)
    for with_defaults in (False, True) if task.include_path else (True,):
        manager = _index(task.include_path, with_defaults, metadata)
        if task.benchmark in manager.all_tags:
            raise ConfigError(
                f"task {task.name}: {task.benchmark!r} is a tag of lm-evaluation-harness, without a score of its own: "
                "make a task of each benchmark that has it"
            )
        if task.benchmark in manager.all_tasks:
            return manager
    where = (
        f", nor does {task.include_path}" if task.include_path else "; name the directory of its file, include_path"
    )
    raise ConfigError(f"task {task.name}: lm-evaluation-harness has no task {task.benchmark!r}{where}")


def _load(task: BenchmarkTask, manager: Any) -> dict[str, Any]:
    """The benchmark with its data.

    Raises:
        ConfigError: if it cannot be read, or has no score.
    """
    try:
        loaded = manager.load(task.benchmark)
    except Exception as error:
        raise _failure(task, error) from error
    group = loaded["groups"].get(task.benchmark)
    if group is not None and not group.has_aggregation:
        raise ConfigError(
            f"task {task.name}: {task.benchmark!r} is a group without a score of its own: make a task of each of "
            f"{', '.join(group.child_names)}"
        )
    return loaded


def _content(task: BenchmarkTask, loaded: dict[str, Any]) -> str:
    """What the harness has read of a benchmark: settings, templates of prompts, metrics, and digests of the data."""
    content = {name: group.to_dict() for name, group in loaded["groups"].items()}
    for name, part in loaded["tasks"].items():
        shots = part.config.num_fewshot if task.num_fewshot is None else task.num_fewshot
        try:
            data = [part.eval_docs if task.limit is None else itertools.islice(part.eval_docs, task.limit)]
            data += [part.fewshot_docs()] if shots else []
        except Exception as error:
            raise _failure(task, error) from error
        content[name] = [part.dump_config(), [_digest(rows) for rows in data]]
    # functions without source are shown with their address, which differs from process to process
    return re.sub(r" at 0x[0-9a-f]+", "", json.dumps(content, sort_keys=True, default=str))


def _digest(rows: Iterable[Any] | None) -> str:
    digest = blake3()
    for row in rows or ():
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _own_files(include_path: str | None) -> dict[str, str]:
    """Digests of the user's functions, which the harness imports from beside the task."""
    files = []
    for folder, folders, names in os.walk(include_path) if include_path else ():
        # a virtual environment, a repository's own files: no task is there
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return {str(file.relative_to(include_path)): digest_file(file) for file in sorted(files)}


def _failure(task: BenchmarkTask, error: Exception) -> ConfigError:
    """What the harness, or the code of a benchmark, raised."""
    problem = " ".join(f"{type(error).__name__}: {error}".split())
    return ConfigError(f"task {task.name}: lm-evaluation-harness failed: {problem}")


@functools.cache
def _index(include_path: str | None, with_defaults: bool, metadata: str) -> Any:
    """Read once: the harness's own tasks are thousands of files."""
    from lm_eval.tasks import TaskManager

    options = json.loads(metadata) or None
    return TaskManager(include_path=include_path, include_defaults=with_defaults, metadata=options)


class _AnotherFailed(DistributedError):
    """Another process left the evaluation with an error of its own."""


def _shared_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int, world: World) -> Any:
    """The harness's view of a loaded model, on one of several processes."""
    from lm_eval.models.huggingface import HFLM

    class SharedModel(HFLM):
        def all_gather(self, tensor: Tensor) -> Tensor:
            return torch.cat([torch.tensor(values).view(-1) for values in self._exchange(tensor.tolist())])

        def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
            values = self._exchange(obj)
            return values if world.rank == dst else None

        def barrier(self) -> None:
            self._exchange(None)

        def _exchange(self, value: Any) -> list[Any]:
            values = world.gather({"benchmark": value})
            for rank, other in enumerate(values):
                # a rank that failed tells so where the others wait for a value
                if not (isinstance(other, dict) and other.keys() == {"benchmark"}):
                    raise _AnotherFailed(f"the benchmark failed on rank {rank}: {other[1] if other else ''}")
            return [other["benchmark"] for other in values]

    shared = SharedModel(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    shared._rank, shared._world_size = world.rank, world.size
    return shared


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value)
