"""What models are evaluated on: a YAML file that names tasks, each by reward, by a benchmark or by perplexity.

```yaml
math:
  agent: math                        # whose own task this is, for the retained gain
  dataset: data/math_test.jsonl      # or a Hub id; a column "prompt", the others reach the reward functions
  reward_funcs: [rewards:exact_match]
  max_new_tokens: 512
gsm8k:
  agent: math
  benchmark: gsm8k                   # a task of lm-evaluation-harness
  metric: exact_match,flexible-extract
stories:
  perplexity: data/stories.jsonl     # a column "text", or "prompt" and "completion"
```
"""

import contextlib
import dataclasses
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..options import load_function, read_yaml
from ..storage.names import check_name


__all__ = ["BenchmarkTask", "PerplexityTask", "RewardTask", "Task", "load_reward_functions", "read_tasks"]


@dataclass(frozen=True, kw_only=True)
class RewardTask:
    """A dataset of prompts and reward functions.

    Args:
        name (`str`):
            Name of the task.
        dataset (`str`):
            A .json, .jsonl, .csv or .parquet file, a directory (of such files, or as `save_to_disk` writes it), or a
            Hub id. Its column `prompt` holds text or messages.
        reward_funcs (`list[str]`):
            Reward functions with TRL's signature, each `MODULE:FUNCTION`.
        reward_weights (`list[float]`, *optional*):
            Weight of each of them in the reward, 1 by default, as in TRL's `GRPOConfig`.
        agent (`str`, *optional*):
            Agent whose own task this is.
        dataset_config (`str`, *optional*):
            Configuration of a Hub dataset.
        split (`str`, *optional*):
            Split of the dataset; `test` of the Hub's by default.
        limit (`int`, *optional*):
            Only so many of its first prompts.
        max_new_tokens (`int`, *optional*, defaults to `256`):
            Longest completion.
        num_samples (`int`, *optional*, defaults to `1`):
            Completions of each prompt; a prompt's score is their mean.
        temperature (`float`, *optional*, defaults to `0.0`):
            Temperature of sampling; 0 decodes greedily.
        top_p (`float`, *optional*, defaults to `1.0`):
            Smallest set of tokens of this probability is sampled from.
        top_k (`int`, *optional*, defaults to `0`):
            So many most probable tokens are sampled from; 0 for all.
        chat_template_kwargs (`dict`, *optional*):
            Arguments of the chat template, like `enable_thinking`.
    """

    name: str
    dataset: str
    reward_funcs: list[str]
    reward_weights: list[float] | None = None
    agent: str | None = None
    dataset_config: str | None = None
    split: str | None = None
    limit: int | None = None
    max_new_tokens: int = 256
    num_samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        _check(self, "reward_funcs is empty", bool(self.reward_funcs))
        weights = self.reward_weights
        is_matched = weights is None or len(weights) == self.num_functions
        _check(self, "reward_weights are not one for each of reward_funcs", is_matched)
        _check(self, "reward_weights are not finite", all(math.isfinite(weight) for weight in weights or ()))
        _check(self, "reward_funcs names a function twice", len(set(self.reward_funcs)) == self.num_functions)
        _check(self, "limit, max_new_tokens and num_samples must be at least 1", self._counts_are_positive())
        _check(self, "temperature must be 0 or more", 0 <= self.temperature < float("inf"))
        _check(self, "top_p must be above 0 and at most 1", 0 < self.top_p <= 1)
        _check(self, "top_k must be 0 or more", self.top_k >= 0)
        is_varied = self.num_samples == 1 or self.temperature > 0
        _check(self, "num_samples > 1 needs a temperature above 0: greedy samples are all alike", is_varied)

    @property
    def num_functions(self) -> int:
        """Number of reward functions."""
        return len(self.reward_funcs)

    def _counts_are_positive(self) -> bool:
        return min(self.max_new_tokens, self.num_samples, 1 if self.limit is None else self.limit) >= 1


@dataclass(frozen=True, kw_only=True)
class BenchmarkTask:
    """A task of lm-evaluation-harness.

    Args:
        name (`str`):
            Name of the task here.
        benchmark (`str`):
            Its name there, of a task or a group.
        metric (`str`, *optional*):
            The metric that is shown, `METRIC` or `METRIC,FILTER`; by default the first that the harness reports.
        agent (`str`, *optional*):
            Agent whose own task this is.
        include_path (`str`, *optional*):
            Directory with YAML files of tasks of your own.
        num_fewshot (`int`, *optional*):
            Examples before each question; by default what the task says.
        limit (`int`, *optional*):
            Only so many of its first questions.
        apply_chat_template (`bool`, *optional*, defaults to `True`):
            Ask as a chat if the tokenizer has a template.
        gen_kwargs (`dict`, *optional*):
            Arguments of generation over those of the task.
        metadata (`dict`, *optional*):
            Passed on to the task, like `max_seq_lengths` of ruler.
        confirm_run_unsafe_code (`bool`, *optional*, defaults to `False`):
            Run code that the model wrote, as mbpp does.
    """

    name: str
    benchmark: str
    metric: str | None = None
    agent: str | None = None
    include_path: str | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    apply_chat_template: bool = True
    gen_kwargs: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    confirm_run_unsafe_code: bool = False

    def __post_init__(self):
        _check(self, "limit must be at least 1", self.limit is None or self.limit >= 1)


@dataclass(frozen=True, kw_only=True)
class PerplexityTask:
    """A dataset that a model should find likely.

    Args:
        name (`str`):
            Name of the task.
        perplexity (`str`):
            The dataset, as `dataset` of [`RewardTask`]: with a column `text`, all of whose tokens count, or with
            `prompt` and `completion` (text or messages), of which the completion's tokens count.
        agent (`str`, *optional*):
            Agent whose own task this is.
        dataset_config (`str`, *optional*):
            Configuration of a Hub dataset.
        split (`str`, *optional*):
            Split of the dataset; `test` of the Hub's by default.
        limit (`int`, *optional*):
            Only so many of its first examples.
        max_length (`int`, *optional*, defaults to `2048`):
            Tokens of an example that are read; the rest is cut off.
        chat_template_kwargs (`dict`, *optional*):
            Arguments of the chat template, like `enable_thinking`.
    """

    name: str
    perplexity: str
    agent: str | None = None
    dataset_config: str | None = None
    split: str | None = None
    limit: int | None = None
    max_length: int = 2048
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        _check(self, "limit must be at least 1", self.limit is None or self.limit >= 1)
        _check(self, "max_length must be at least 2: the first token follows on none", self.max_length >= 2)


Task = RewardTask | BenchmarkTask | PerplexityTask

# The option that tells what kind of task it is; by reward without one of these.
_KINDS = {"benchmark": BenchmarkTask, "perplexity": PerplexityTask}


def read_tasks(path: str) -> list[Task]:
    """Read a YAML file of tasks.

    Raises:
        ConfigError: naming the task and the option that cannot be used.
    """
    if not Path(path).is_file():
        raise ConfigError(f"tasks: {path} is not a file of tasks")
    content = read_yaml(path)
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"tasks: {path} names no task (name: its options)")
    return [_task(name, options) for name, options in content.items()]


def load_reward_functions(task: RewardTask) -> dict[str, Callable[..., Any]]:
    """Import the reward functions of a task, by the names that it has for them.

    Raises:
        ConfigError: naming the task and the function, if there is no such function.
    """
    option = f"task {task.name}: reward_funcs"
    return {name: load_function(name, option) for name in task.reward_funcs}


def _task(name: Any, options: Any) -> Task:
    if not isinstance(name, str) or not isinstance(options, dict):
        raise ConfigError(f"task {name!r} is not of the form NAME: its options")
    check_name(name, "task")
    kinds = [kind for option, kind in _KINDS.items() if option in options]
    if len(kinds) > 1:
        raise ConfigError(f"task {name} is by benchmark or by perplexity: make two tasks of it")
    kind = kinds[0] if kinds else RewardTask
    known = {option.name: option for option in dataclasses.fields(kind) if option.name != "name"}
    hints = typing.get_type_hints(kind)
    values = {}
    for option, value in options.items():
        if option not in known:
            raise ConfigError(f"task {name}: unknown option {option!r}; known are: {', '.join(known)}")
        if value is not None:
            values[option] = _converted(name, option, value, hints[option])
    for option in known.values():
        is_needed = option.default is dataclasses.MISSING and option.default_factory is dataclasses.MISSING
        if is_needed and option.name not in values:
            raise ConfigError(
                f"task {name}: {option.name} is missing (or benchmark: a task of lm-evaluation-harness, or "
                "perplexity: a dataset)"
            )
    return kind(name=name, **values)


def _converted(task: str, option: str, value: Any, hint: Any) -> Any:
    """A value of YAML, which has integers for some floats, as the type of its field."""
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    kind, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is list and isinstance(value, list):
        return [_converted(task, option, item, inner[0]) for item in value]
    if kind is float and isinstance(value, str):
        # YAML takes 1e-1 for a text
        with contextlib.suppress(ValueError):
            value = float(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float and is_number:
        return float(value)
    if not isinstance(value, kind) or (kind is int and not is_number):
        raise ConfigError(f"task {task}: {option}={value!r} is not of the form {hint if inner else kind.__name__}")
    return value


def _check(task: Any, problem: str, is_right: bool) -> None:
    if not is_right:
        raise ConfigError(f"task {task.name}: {problem}")
