"""What came out of a sweep: scores, the best, tables, and the best as options of `recipes/merge.py`."""

import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError
from ..evaluating.report import PERPLEXITY, kind_of
from ..evaluating.statistics import Estimate
from ..storage.registry import AgentRegistry
from ..table import align, escape_markdown, markdown_table
from .search import Trial
from .space import Space


__all__ = ["SweepResult", "check_comparable", "score_of"]

# Columns of the table that are not scores.
_HALF, _KEPT = "+-", "retained gain"


def check_comparable(kinds: Mapping[str, str]) -> None:
    """Refuse tasks whose scores have no common mean.

    Args:
        kinds (`Mapping[str, str]`):
            The kind of scores of each task, from [`~ram_trl.evaluating.report.kind_of`].

    Raises:
        ConfigError: naming two of them and the cure.
    """
    first: dict[str, str] = {}
    for task, kind in kinds.items():
        first.setdefault(kind, task)
    if len(first) > 1:
        (one, task), (other, another) = list(first.items())[:2]
        raise ConfigError(
            f"tasks {task} ({one}) and {another} ({other}) have no common mean to choose by: sweep with tasks of one "
            "kind, and evaluate the best on the others with recipes/evaluate.py"
        )


def score_of(content: Mapping[str, Any], name: str) -> Estimate | None:
    """What a merge is judged by: its mean score over the tasks.

    Args:
        content (`Mapping`):
            Content of `evaluation.json`, with tasks that are comparable.
        name (`str`):
            Name of its row.

    Returns:
        [`~ram_trl.evaluating.statistics.Estimate`]: `None` if there is no such row, it has no score in some task, or
        fewer of its prompts have one than of the base's: a mean over the others is of other prompts.
    """
    mean = content["rows"].get(name, {}).get("mean")
    if mean is None or mean["value"] is None or _left_out(content, name):
        return None
    return Estimate(mean["value"], *(mean["interval"] or (None, None)), mean["n"])


def _left_out(content: Mapping[str, Any], name: str) -> list[str]:
    """Tasks in which fewer prompts of a row have a score than of the base, with both numbers."""
    counts = {task: [_shown(content, row, task)["n"] for row in (name, "base")] for task in content["tasks"]}
    return [f"{n} of {expected} in {task}" for task, (n, expected) in counts.items() if n < expected]


def _shown(content: Mapping[str, Any], name: str, task: str) -> Mapping[str, Any]:
    """The estimate of a row that is shown of a task."""
    return content["rows"][name]["tasks"][task]["metrics"][content["tasks"][task]["metric"]]


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
        name, task = next(iter(self.content["tasks"].items()))
        measure = f"{self._mean} over the tasks" if self.has_mean else f"score of {name}"
        return f"{measure} ({kind_of(task)})"

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
    def unscored(self) -> dict[str, str]:
        """Why merges have no score, by name."""
        names = [name for name, trial in self.trials.items() if trial.score is None]
        return {name: self.content["failed"].get(name) or self._gap(name) for name in names}

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
        if self.unscored:
            unscored = [f"- {escape_markdown(f'{name}: {problem}')}" for name, problem in self.unscored.items()]
            parts.append("\n".join(["Without a score:", "", *unscored]))
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
        kind = kind_of(next(iter(self.content["tasks"].values())))
        return "geometric mean" if kind == PERPLEXITY else "mean"

    def _gap(self, name: str) -> str:
        if left_out := _left_out(self.content, name):
            return f"some of its prompts have no score, which those of the base have: {', '.join(left_out)}"
        scores = dict(zip(self.content["tasks"], self._scores(name), strict=True))
        return f"no finite score of {', '.join(task for task, score in scores.items() if score is None)}"

    def _table(self) -> tuple[list[str], list[str], list[tuple[float | None, ...]]]:
        """The head of the table, the names of its lines (base, merges; of a search the best first), its columns."""
        names = [*self.ranked, *self.unscored] if self.is_search else list(self.trials)
        names = ["base", *(name for name in names if name in self.content["rows"])]
        head = ["", *self.content["tasks"], *([self._mean] if self.has_mean else []), _HALF, _KEPT]
        return head, names, list(zip(*map(self._numbers, names), strict=True))

    def _scores(self, name: str) -> list[float | None]:
        return [_shown(self.content, name, task)["value"] for task in self.content["tasks"]]

    def _numbers(self, name: str) -> list[float | None]:
        """A line: scores, their mean, half of its interval, and what is kept of the agents' gains."""
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
        return [*self._scores(name), *([estimate.value] if self.has_mean else []), half, kept]


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
