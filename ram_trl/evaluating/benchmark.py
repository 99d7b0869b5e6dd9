"""Evaluation by benchmark: lm-evaluation-harness on the loaded model, the extra `ram_trl[eval]`."""

import functools
import importlib.metadata
import json
import logging
import math
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..distributed import World
from ..errors import ConfigError, DistributedError
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
        # changes with the version of the harness
        self.fingerprint = blake3(repr([seed, importlib.metadata.version("lm_eval")]).encode()).hexdigest()

    def run(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int, world: World
    ) -> tuple[dict[str, Measurement], list[dict[str, Any]]]:
        """Evaluate a model. All ranks call it; the harness gives each its share of the questions.

        Returns:
            `tuple[dict[str, Measurement], list[dict]]`: on every rank, by `METRIC,FILTER`, the one that is shown
            first; and what the harness recorded of every question.
        """
        try:
            results = self._evaluate(model, tokenizer, batch_size, world)
        except _AnotherFailed:
            raise
        except Exception as error:
            # it comes from the harness, or from the task
            problem = " ".join(f"{type(error).__name__}: {error}".split())
            failure = ConfigError(f"task {self.task.name}: lm-evaluation-harness failed: {problem}")
            world.agree(failure)
            raise failure from error
        world.agree(None)
        results = world.run_on_main(lambda: results)
        measured = self._measurements(results)
        samples = [
            {"task": name, "prompt": _text(sample["arguments"]), "completion": _text(sample["filtered_resps"])}
            for name, group in results["samples"].items()
            for sample in group
        ]
        return measured, samples

    def _evaluate(self, model, tokenizer, batch_size: int, world: World) -> dict[str, Any] | None:
        from lm_eval import simple_evaluate

        task = self.task
        return simple_evaluate(
            model=_shared_model(model, tokenizer, batch_size, world),
            tasks=[task.benchmark],
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
        task = self.task
        values = {**results["results"], **results.get("groups", {})}[task.benchmark]
        metrics = [name for name in values if "," in name and "_stderr," not in name and _is_number(values[name])]
        shown = [name for name in metrics if task.metric in (None, name, name.partition(",")[0])]
        if not shown:
            raise ConfigError(f"task {task.name}: metric {task.metric!r} is none of {', '.join(metrics) or 'nothing'}")
        count = results["n-samples"].get(task.benchmark, {}).get("effective", 0)
        measured = {}
        for name in [shown[0], *(name for name in metrics if name != shown[0])]:
            metric, _, kind = name.partition(",")
            mean, stderr = float(values[name]), values.get(f"{metric}_stderr,{kind}")
            samples = results["samples"].get(task.benchmark, [])
            samples = [sample for sample in samples if sample["filter"] == kind and _is_number(sample.get(metric))]
            samples.sort(key=lambda sample: sample["doc_id"])
            scores = [float(sample[metric]) for sample in samples]
            # of other aggregations than the mean the questions have no scores
            is_mean = scores and math.isclose(math.fsum(scores) / len(scores), mean, rel_tol=1e-9, abs_tol=1e-12)
            measured[name] = Measurement(
                scores=scores if is_mean else None,
                mean=mean,
                stderr=float(stderr) if _is_number(stderr) else None,
                n=len(scores) or count,
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
        if task.benchmark in manager.all_tasks:
            return manager
    where = (
        f", nor does {task.include_path}" if task.include_path else "; name the directory of its file, include_path"
    )
    raise ConfigError(f"task {task.name}: lm-evaluation-harness has no task {task.benchmark!r}{where}")


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
