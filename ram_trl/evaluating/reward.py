"""Evaluation by reward: the user's reward functions on completions of a dataset's prompts."""

import asyncio
import copy
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3
from transformers import PreTrainedTokenizerBase, TrainerState

from ..distributed import World
from ..errors import ConfigError
from ..options import load_function
from ..progress import Progress
from .generation import is_conversation, prompt_tokens, sample_seed
from .statistics import Measurement
from .tasks import RewardTask


__all__ = ["Generator", "RewardEvaluation"]

_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
# Columns that TRL does not pass to reward functions among the others.
_NOT_PASSED = ("prompt", "completion", "completion_ids")
# Names of what TRL passes beside the columns: a column of that name would take its place.
_RESERVED = ("prompts", "completions", "trainer_state", "log_extra", "log_metric")


class Generator(Protocol):
    """What completes prompts."""

    batch_size: int
    tokenizer: PreTrainedTokenizerBase

    def generate(self, prompts: Sequence[list[int]], seeds: Sequence[int], task: RewardTask) -> list[list[int]]:
        """Tokens of a completion of each prompt."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """A completion, and what each reward function gives for it."""

    prompt: int
    sample: int
    text: str
    rewards: list[float | None]


class RewardEvaluation:
    """A task by reward, its dataset and functions loaded.

    Args:
        task ([`~ram_trl.evaluating.tasks.RewardTask`]):
            The task.
        seed (`int`):
            Seed of sampling.

    Raises:
        ConfigError: if the dataset or a function cannot be had.
    """

    def __init__(self, task: RewardTask, seed: int):
        self.task, self._seed = task, seed
        option = f"task {task.name}: reward_funcs"
        self._functions = {name: load_function(name, option) for name in task.reward_funcs}
        self._rows = _load_rows(task)
        sources = [_source(function) for function in self._functions.values()]
        # changes when the dataset or the file of a reward function does
        self.fingerprint = blake3(repr([seed, sources, self._rows]).encode()).hexdigest()

    def run(
        self, generator: Generator, world: World, progress: Progress | None
    ) -> tuple[dict[str, Measurement], list[dict[str, Any]]]:
        """Evaluate whatever model the generator holds. All ranks call it; each completes its share of the prompts.

        Batches are the same whatever the number of processes: prompts by length, the longest first.

        Returns:
            `tuple[dict[str, Measurement], list[dict]]`: on every rank, by metric, the reward first; and a record of
            each completion.
        """
        local = world.run(lambda: self._answer(generator, world, progress))
        answers = [answer for part in world.gather(local) for answer in part]
        answers.sort(key=lambda answer: (answer.prompt, answer.sample))
        by_prompt: list[list[_Answer]] = [[] for _ in self._rows]
        for answer in answers:
            by_prompt[answer.prompt].append(answer)
        metrics = {"reward": [_mean([self._reward(a) for a in group]) for group in by_prompt]}
        if len(self._functions) > 1:
            for position, name in enumerate(self._functions):
                metrics[name] = [_mean([answer.rewards[position] for answer in group]) for group in by_prompt]
        records = [
            {
                "prompt": self._rows[answer.prompt]["prompt"],
                "completion": answer.text,
                "rewards": dict(zip(self._functions, answer.rewards, strict=True)),
            }
            for answer in answers
        ]
        return {name: Measurement(scores) for name, scores in metrics.items()}, records

    def _answer(self, generator: Generator, world: World, progress: Progress | None) -> list[_Answer]:
        task, tokenizer = self.task, generator.tokenizer
        prompts = [prompt_tokens(tokenizer, row["prompt"], task) for row in self._rows]
        wanted = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(task.num_samples)]
        wanted.sort(key=lambda pair: (-len(prompts[pair[0]]), pair))
        batches = [wanted[at : at + generator.batch_size] for at in range(0, len(wanted), generator.batch_size)]
        batches = batches[world.rank :: world.size]
        answers, total = [], sum(map(len, batches))
        for batch in batches:
            seeds = [sample_seed(self._seed, task.name, *pair) for pair in batch]
            tokens = generator.generate([prompts[prompt] for prompt, _ in batch], seeds, task)
            texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
            rewards = self._rewards([self._rows[prompt] for prompt, _ in batch], texts, tokens)
            for pair, text, values in zip(batch, texts, rewards, strict=True):
                answers.append(_Answer(*pair, text, values))
            if progress:
                progress(task.name, len(answers), total)
        return answers

    def _rewards(
        self, rows: list[dict[str, Any]], texts: list[str], tokens: list[list[int]]
    ) -> list[list[float | None]]:
        """For every completion, what each function gives."""
        completions = [
            [{"role": "assistant", "content": text}] if is_conversation(row["prompt"]) else text
            for row, text in zip(rows, texts, strict=True)
        ]
        arguments = {
            "prompts": [copy.deepcopy(row["prompt"]) for row in rows],
            "completions": completions,
            "completion_ids": tokens,
            # copies: what a function does to them must not change the prompts of the next model
            **{key: [copy.deepcopy(row[key]) for row in rows] for key in rows[0] if key not in _NOT_PASSED},
            # what TRL passes besides; there is no training to look at, and no log to add to
            "trainer_state": TrainerState(),
            "log_extra": _ignore,
            "log_metric": _ignore,
        }
        columns = [self._call(name, function, arguments) for name, function in self._functions.items()]
        return [list(values) for values in zip(*columns, strict=True)]

    def _call(self, name: str, function: Callable, arguments: dict[str, Any]) -> list[float | None]:
        where = f"task {self.task.name}: reward function {name}"
        try:
            values = function(**arguments)
            if inspect.isawaitable(values):
                values = asyncio.run(_result(values))
            rewards = [None if value is None else float(value) for value in values]
        except Exception as error:
            # it is the user's, and can raise anything
            problem = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"{where} failed: {problem}") from error
        if len(rewards) != len(arguments["prompts"]):
            raise ConfigError(
                f"{where} gave {len(rewards)} rewards for {len(arguments['prompts'])} completions: it must give one "
                "for each"
            )
        for prompt, reward in zip(arguments["prompts"], rewards, strict=True):
            if reward is not None and not math.isfinite(reward):
                raise ConfigError(
                    f"{where} gave {reward} for the prompt {str(prompt)[:80]!r}: give None where there is no reward"
                )
        return rewards

    def _reward(self, answer: _Answer) -> float | None:
        """Weighted sum of what the functions gave, as in TRL."""
        weights = self.task.reward_weights or [1.0] * len(answer.rewards)
        known = [(weight, value) for weight, value in zip(weights, answer.rewards, strict=True) if value is not None]
        return math.fsum(weight * value for weight, value in known) if known else None


def _load_rows(task: RewardTask) -> list[dict[str, Any]]:
    # imported here: it takes a second, and benchmarks do without
    from datasets import load_dataset, load_from_disk

    path, name = Path(task.dataset), task.dataset
    where = f"task {task.name}: dataset {name!r}"
    if path.is_file() and path.suffix not in _FORMATS:
        raise ConfigError(f"{where} is none of {', '.join(_FORMATS)}")
    if path.is_file() and not path.stat().st_size:
        raise ConfigError(f"{where} has no prompts")
    try:
        if path.is_file():
            rows = load_dataset(_FORMATS[path.suffix], data_files=name, split=task.split or "train")
        elif path.is_dir() and any((path / marker).exists() for marker in ("dataset_info.json", "dataset_dict.json")):
            rows = load_from_disk(name)
            rows = rows[task.split or "test"] if isinstance(rows, dict) else rows
        else:
            rows = load_dataset(name, task.dataset_config, split=task.split or "test")
    except Exception as error:
        # the readers of files raise errors of their own libraries
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{where} cannot be loaded: {problem}") from error
    if "prompt" not in rows.column_names:
        raise ConfigError(f"{where} has no column 'prompt', only {', '.join(rows.column_names) or 'nothing'}")
    if reserved := sorted(set(rows.column_names) & set(_RESERVED)):
        raise ConfigError(
            f"{where} has a column {reserved[0]!r}, which reward functions get something else as: rename it"
        )
    if not len(rows):
        raise ConfigError(f"{where} has no prompts")
    return rows.select(range(min(len(rows), task.limit or len(rows)))).to_list()


def _source(function: Callable) -> str:
    """The file that a function is in, if it can be found: classes and compiled functions have none."""
    function = inspect.unwrap(function)
    path = inspect.getsourcefile(function) if inspect.isfunction(function) else None
    return Path(path).read_text(encoding="utf-8") if path else repr(function)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _ignore(*_: Any, **__: Any) -> None:
    """In the place of what TRL's reward functions may log with."""


async def _result(awaitable: Any) -> Any:
    return await awaitable
