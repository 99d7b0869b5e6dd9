"""Evaluation by reward: the user's reward functions on completions of a dataset's prompts."""

import asyncio
import copy
import functools
import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3
from transformers import PreTrainedTokenizerBase, TrainerState

from ..distributed import World
from ..errors import ConfigError
from ..progress import Progress
from ..storage.durable import digest_file
from .data import load_examples
from .generation import is_conversation, prompt_tokens, sample_seed
from .statistics import Measurement
from .tasks import RewardTask, load_reward_functions


__all__ = ["Generator", "RewardEvaluation"]

# Columns that TRL does not pass to reward functions among the others.
_NOT_PASSED = ("prompt", "completion", "completion_ids")
# Names of what TRL passes beside the columns: a column of that name would take its place.
_RESERVED = ("prompts", "completions", "trainer_state", "log_extra", "log_metric")
# Squares of larger ones would not be finite.
_LARGEST_REWARD = 1e100

# Of the files of reward functions, when they were first looked at: Python does not import a changed one again.
_digests: dict[str, str] = {}


class Generator(Protocol):
    """What completes prompts."""

    batch_size: int
    max_length: int | None
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
        self._functions = load_reward_functions(task)
        self._rows = _load_rows(task)
        sources = [_source(name, function) for name, function in self._functions.items()]
        # changes when the dataset or a file of a reward function does
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
        longest = max(map(len, prompts))
        if generator.max_length is not None and longest + task.max_new_tokens > generator.max_length:
            raise ConfigError(
                f"task {task.name}: a prompt of {longest} tokens and max_new_tokens={task.max_new_tokens} are more "
                f"than the {generator.max_length} that the model can read (max_position_embeddings): lower "
                "max_new_tokens or leave such prompts out"
            )
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
        # asynchronous ones run while the others are called
        given = {name: self._called(name, function, arguments) for name, function in self._functions.items()}
        columns = [self._checked(name, values, rows) for name, values in given.items()]
        return [list(values) for values in zip(*columns, strict=True)]

    def _called(self, name: str, function: Callable, arguments: dict[str, Any]) -> Any:
        with self._explained(name):
            values = function(**arguments)
            if inspect.isawaitable(values):
                return asyncio.run_coroutine_threadsafe(_result(values), _event_loop())
            return values

    def _checked(self, name: str, values: Any, rows: list[dict[str, Any]]) -> list[float | None]:
        where = f"task {self.task.name}: reward function {name}"
        with self._explained(name):
            values = values.result() if isinstance(values, Future) else values
            if isinstance(values, str | Mapping):
                raise TypeError(f"it gave a {type(values).__name__}, not a list of rewards")
            rewards = [None if value is None else float(value) for value in values]
        if len(rewards) != len(rows):
            raise ConfigError(
                f"{where} gave {len(rewards)} rewards for {len(rows)} completions: it must give one for each"
            )
        for row, reward in zip(rows, rewards, strict=True):
            # not NaN either
            if reward is not None and not abs(reward) <= _LARGEST_REWARD:
                raise ConfigError(
                    f"{where} gave {reward} for the prompt {str(row['prompt'])[:80]!r}: give None where there is no "
                    "reward"
                )
        return rewards

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            # the function is the user's, and can raise anything
            problem = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"task {self.task.name}: reward function {name} failed: {problem}") from error

    def _reward(self, answer: _Answer) -> float | None:
        """Weighted sum of what the functions gave, as in TRL."""
        weights = self.task.reward_weights or [1.0] * len(answer.rewards)
        known = [(weight, value) for weight, value in zip(weights, answer.rewards, strict=True) if value is not None]
        return math.fsum(weight * value for weight, value in known) if known else None


def _load_rows(task: RewardTask) -> list[dict[str, Any]]:
    rows, where = load_examples(task, task.dataset), f"task {task.name}: dataset {task.dataset!r}"
    if "prompt" not in rows.column_names:
        raise ConfigError(f"{where} has no column 'prompt', only {', '.join(rows.column_names) or 'nothing'}")
    if reserved := sorted(set(rows.column_names) & set(_RESERVED)):
        raise ConfigError(
            f"{where} has a column {reserved[0]!r}, which reward functions get something else as: rename it"
        )
    return rows.to_list()


def _source(name: str, function: Callable) -> list[str]:
    """Digests of the files that a function comes from: of the module that names it, and where it was written."""
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    # of a callable object it is its class that was written
    written = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    modules = [sys.modules.get(module) for module in (name.partition(":")[0], written.__module__)]
    # what is compiled into the interpreter has no file
    paths = [getattr(module, "__file__", None) for module in modules]
    digests = []
    for path in filter(None, paths):
        digests.append(digest_file(Path(path)))
        if _digests.setdefault(path, digests[-1]) != digests[-1]:
            raise ConfigError(
                f"reward function {name}: {path} changed after it was imported, and is not imported again: start a "
                "new process"
            )
    return digests


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """A loop in a thread of its own, the one of all asynchronous functions: their clients belong to a loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="ram_trl rewards", daemon=True).start()
    return loop


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _ignore(*_: Any, **__: Any) -> None:
    """In the place of what TRL's reward functions may log with."""


async def _result(awaitable: Any) -> Any:
    return await awaitable
