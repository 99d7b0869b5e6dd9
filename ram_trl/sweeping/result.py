"""What came out of a sweep: scores, the best, tables, and the best as options of `recipes/merge.py`."""

import functools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError
from ..evaluating.statistics import Estimate
from ..evaluating.tasks import BenchmarkTask, PerplexityTask, Task
from ..storage.registry import AgentRegistry
from ..table import align, escape_markdown, markdown_table
from .search import Trial
from .space import Space


__all__ = ["SweepResult", "check_comparable", "check_tasks", "score_of"]

_HIGHER, _LOWER, _PERPLEXITY = "higher is better", "lower is better", "perplexity, lower is better"
# Columns of the table that are not scores.
_HALF, _KEPT = "+-", "retained gain"


def check_tasks(tasks: Sequence[Task]) -> None:
    """Refuse tasks of which it is known before anything is measured that their scores have no common mean.

    Raises:
        ConfigError: naming two of them and the cure.
    """
    # a benchmark's direction is known when it has run
    known = [task for task in tasks if not isinstance(task, BenchmarkTask)]
    _check_one_kind((task.name, _PERPLEXITY if isinstance(task, PerplexityTask) else _HIGHER) for task in known)


def check_comparable(tasks: Mapping[str, Mapping[str, Any]]) -> None:
    """The same, of the tasks in the content of `evaluation.json`.

    Raises:
        ConfigError: naming two of them and the cure.
    """
    _check_one_kind((name, _kind(task)) for name, task in tasks.items())


def score_of(content: Mapping[str, Any], name: str) -> Estimate | None:
    """What a merge is judged by: its mean score over the tasks, of perplexities the geometric mean.

    Args:
        content (`Mapping`):
            Content of `evaluation.json`, with tasks that are comparable.
        name (`str`):
            Name of its row.

    Returns:
        [`~ram_trl.evaluating.statistics.Estimate`]: `None` if there is no such row, or it has no score in some task.
    """
    row = content["rows"].get(name)
    if row is None:
        return None
    cells = [row["tasks"][task]["metrics"][known["metric"]] for task, known in content["tasks"].items()]
    if len(cells) > 1 and all(_kind(task) == _PERPLEXITY for task in content["tasks"].values()):
        return _geometric_mean(cells)
    mean = cells[0] if len(cells) == 1 else row["mean"]
    return None if mean["value"] is None else Estimate(mean["value"], *(mean["interval"] or (None, None)), mean["n"])


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """What came out of a sweep.

    Args:
        space ([`~ram_trl.sweeping.space.Space`]):
            The merges that there are.
        content (`dict`):
            Content of `evaluation.json`.
        trials (`dict[str, Trial]`):
            The merges that were tried, by name.
        is_search (`bool`):
            Whether they were proposed by a search.
    """

    space: Space
    content: dict[str, Any]
    trials: dict[str, Trial]
    is_search: bool

    @property
    def higher_is_better(self) -> bool:
        return all(task["higher_is_better"] for task in self.content["tasks"].values())

    @property
    def has_mean(self) -> bool:
        return len(self.content["tasks"]) > 1

    @property
    def measure(self) -> str:
        """What the merges are judged by, in words."""
        kind = _kind(next(iter(self.content["tasks"].values())))
        if not self.has_mean:
            return f"score of {next(iter(self.content['tasks']))} ({kind})"
        return f"{self._mean} over the tasks ({kind})"

    @functools.cached_property
    def ranked(self) -> list[str]:
        """Names of the merges that have a score, the best first; of equal ones the first that was tried."""
        names = [name for name, trial in self.trials.items() if trial.score is not None]
        return sorted(names, key=lambda name: self.trials[name].score * (-1 if self.higher_is_better else 1))

    @property
    def best(self) -> str | None:
        """Name of the best merge, if any has a score."""
        return next(iter(self.ranked), None)

    @property
    def failed(self) -> dict[str, str]:
        """Why merges could not be made, by name."""
        return {name: trial.failed for name, trial in self.trials.items() if trial.failed is not None}

    def text(self) -> str:
        """The table as plain text, with a star at the best."""
        head, names, columns = self._table()
        names = [f"{name} *" if name == self.best else name for name in names]
        cells = [_cells(title, column) for title, column in zip(head[1:], columns, strict=True)]
        return "\n".join(align([head, *zip(names, *cells, strict=True)], 1))

    def markdown(self) -> str:
        """The table as `sweep.md`, marked as table 2 of the paper: the best of every column, and the second."""
        head, names, columns = self._table()
        cells = [
            _marked(title, column, self.higher_is_better) for title, column in zip(head[1:], columns, strict=True)
        ]
        rows = [list(map(escape_markdown, head)), *zip(map(escape_markdown, names), *cells, strict=True)]
        parts = [
            f"# Sweep over {len(self.trials)} merges",
            f"Judged by the {self.measure}. Bold: the best of the merges; underlined: the second.",
            "\n".join(markdown_table(rows, 1)),
        ]
        if self.failed:
            failed = [f"- {escape_markdown(f'{name}: {problem}')}" for name, problem in self.failed.items()]
            parts.append("\n".join(["Not evaluated:", "", *failed]))
        return "\n\n".join(parts) + "\n"

    def best_options(self, registry: AgentRegistry, base_model: str | None) -> str:
        """The best as a file for `recipes/merge.py --config`, with the versions of the agents that were evaluated."""
        trial = self.trials[self.best]
        options = {"registry": os.path.abspath(registry.path)}
        if base_model is not None:
            # a path, or a name on the Hub
            options["base_model"] = os.path.abspath(base_model) if Path(base_model).exists() else base_model
        comment = f"# The best of {len(self.ranked)} merges, {trial.score:.6g} by the {self.measure}."
        return f"{comment}\n{yaml.safe_dump({**options, **trial.settings}, sort_keys=False)}"

    @property
    def _mean(self) -> str:
        kind = _kind(next(iter(self.content["tasks"].values())))
        return "geometric mean" if kind == _PERPLEXITY else "mean"

    def _head(self) -> list[str]:
        return ["", *self.content["tasks"], *([self._mean] if self.has_mean else []), _HALF, _KEPT]

    def _table(self) -> tuple[list[str], list[str], list[tuple[float | None, ...]]]:
        """The head of the table, the names of its lines (base, merges; of a search the best first), its columns."""
        names = list(self.trials)
        if self.is_search:
            names.sort(key=lambda name: self.ranked.index(name) if name in self.ranked else len(names))
        names = ["base", *(name for name in names if name in self.content["rows"])]
        return self._head(), names, list(zip(*map(self._numbers, names), strict=True))

    def _numbers(self, name: str) -> list[float | None]:
        """A line: scores, their mean, half of its interval, and what is kept of the agents' gains."""
        cells = self.content["rows"][name]["tasks"]
        scores = [cells[task]["metrics"][known["metric"]]["value"] for task, known in self.content["tasks"].items()]
        estimate = score_of(self.content, name) or Estimate(None, None, None, 0)
        half = None if estimate.low is None else (estimate.high - estimate.low) / 2
        agents = self.trials[name].settings["agents"] if name in self.trials else []
        # of the agents that are in the merge, where the ratio says something
        gains = [
            gain["value"]
            for gain in self.content["retained_gain"]
            if gain["row"] == name and gain["agent"] in agents and gain["note"] is None and gain["value"] is not None
        ]
        kept = math.fsum(gains) / len(gains) if gains else None
        return [*scores, *([estimate.value] if self.has_mean else []), half, kept]


def _cells(head: str, column: Sequence[float | None]) -> list[str]:
    """A column of the table as text."""
    form = ".1%" if head == _KEPT else ".3f"
    return ["-" if value is None else f"{value:{form}}" for value in column]


def _marked(head: str, column: Sequence[float | None], higher_is_better: bool) -> list[str]:
    """A column in Markdown, its best and second-best merge marked; the first line is the base."""
    texts = _cells(head, column)
    known = sorted({value for value in column[1:] if value is not None}, reverse=higher_is_better or head == _KEPT)
    if head == _HALF or len(known) < 2:
        return texts
    forms = {known[0]: "**{}**", known[1]: "<u>{}</u>"}
    return texts[:1] + [forms.get(value, "{}").format(text) for text, value in zip(texts[1:], column[1:], strict=True)]


def _kind(task: Mapping[str, Any]) -> str:
    """Which scores a task's can be averaged with."""
    if task["higher_is_better"]:
        return _HIGHER
    return _PERPLEXITY if task["kind"] == "perplexity" or "perplexity" in task["metric"] else _LOWER


def _check_one_kind(kinds: Iterable[tuple[str, str]]) -> None:
    first: dict[str, str] = {}
    for name, kind in kinds:
        first.setdefault(kind, name)
    if len(first) > 1:
        (one, task), (other, another) = list(first.items())[:2]
        raise ConfigError(
            f"tasks {task} ({one}) and {another} ({other}) have no common mean to choose by: sweep with tasks of one "
            "kind, and evaluate the best on the others with recipes/evaluate.py"
        )


def _geometric_mean(cells: Sequence[Mapping[str, Any]]) -> Estimate | None:
    """The mean of the logarithms, in which perplexities of easy and of hard texts count alike."""
    if any(cell["value"] is None or cell["value"] <= 0 for cell in cells):
        return None
    logs, n = [math.log(cell["value"]) for cell in cells], sum(cell["n"] for cell in cells)
    mean = math.fsum(logs) / len(logs)
    if any(cell["interval"] is None or cell["interval"][0] <= 0 for cell in cells):
        return Estimate(math.exp(mean), None, None, n)
    # of tasks that are independent of each other
    low, high = (
        math.hypot(*(math.log(cell["interval"][end]) - log for cell, log in zip(cells, logs, strict=True))) / len(logs)
        for end in (0, 1)
    )
    return Estimate(math.exp(mean), math.exp(mean - low), math.exp(mean + high), n)
