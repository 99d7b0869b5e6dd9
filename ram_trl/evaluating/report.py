"""The tables of an evaluation: scores, differences to the base, retained gains; as data, as text and as Markdown."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..errors import ConfigError
from ..table import align, escape_markdown, markdown_table
from ..version import __version__
from .rows import Row
from .statistics import Estimate, Measurement, difference, mean_of, retained_gain
from .tasks import BenchmarkTask, PerplexityTask, RewardTask, Task


__all__ = ["build_evaluation", "format_evaluation", "markdown_evaluation"]

_UNCLEAR = "the agent's own gain is not distinguishable from 0"
_WORSE = "the agent is worse than the base on its own task"
_MARKS = {_UNCLEAR: "a", _WORSE: "b"}
_KINDS = {RewardTask: "reward", BenchmarkTask: "benchmark", PerplexityTask: "perplexity"}
_NOTHING = Measurement()
_NONE = Estimate(None, None, None, 0)


def build_evaluation(
    rows: Sequence[Row],
    tasks: Sequence[Task],
    results: dict[str, dict[str, dict[str, Any]]],
    settings: dict[str, Any],
    failed: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Content of `evaluation.json`.

    Args:
        rows (`Sequence[Row]`):
            Rows that were measured in every task, the base first.
        tasks (`Sequence[Task]`):
            Tasks.
        results (`dict`):
            By row and task, what was measured.
        settings (`dict`):
            What else to record.
        failed (`Mapping[str, str]`, *optional*):
            Rows that could not be made, and why.

    Raises:
        ConfigError: if a task has no metric of the name that it is to be shown by.
    """
    measured = {
        row: {
            task: {metric: Measurement(**values) for metric, values in result["metrics"].items()}
            for task, result in by_task.items()
        }
        for row, by_task in results.items()
    }
    # one metric for all rows, also where it is missing in one of them
    metric = {task.name: _shown_metric(task, measured["base"][task.name]) for task in tasks}
    shown = {row.name: {name: measured[row.name][name].get(metric[name], _NOTHING) for name in metric} for row in rows}
    is_comparable = len({shown["base"][name].higher_is_better for name in metric}) == 1
    content = {
        "ram_trl_version": __version__,
        **settings,
        "intervals": "95 %, Student t over prompts; differences paired by prompt; retained gain by Fieller's theorem",
        "tasks": {
            task.name: {
                "kind": _KINDS[type(task)],
                "metric": metric[task.name],
                "higher_is_better": shown["base"][task.name].higher_is_better,
                "agent": task.agent,
                "options": {name: value for name, value in asdict(task).items() if name not in ("name", "agent")},
            }
            for task in tasks
        },
        "rows": {},
        "retained_gain": [],
        "failed": dict(failed or {}),
    }
    for row in rows:
        cells = {}
        for task in tasks:
            result, reference = results[row.name][task.name], measured["base"][task.name]
            metrics = {**dict.fromkeys(reference, _NOTHING), **measured[row.name][task.name]}
            cells[task.name] = {
                "seconds": result["seconds"],
                "completions": result["completions"],
                "metrics": {name: _score(measurement) for name, measurement in metrics.items()},
                "difference": {
                    name: difference(measurement, reference.get(name, _NOTHING)).to_dict()
                    for name, measurement in metrics.items()
                },
            }
        scores = [mean_of(shown[row.name][task.name]) for task in tasks]
        gains = [difference(shown[row.name][task.name], shown["base"][task.name]) for task in tasks]
        content["rows"][row.name] = {
            "kind": row.kind,
            "agent": row.agent,
            "identity": row.identity,
            "tasks": cells,
            "mean": (_average(scores) if is_comparable else _NONE).to_dict(),
            "mean_difference": (_average(gains) if is_comparable else _NONE).to_dict(),
        }
    for row in rows:
        content["retained_gain"] += [
            _retained(row, own, task, shown)
            for task in tasks
            for own in rows
            if row.kind == "merged" and own.agent is not None and own.agent == task.agent
        ]
    return content


def _shown_metric(task: Task, metrics: Mapping[str, Measurement]) -> str:
    wanted = task.metric if isinstance(task, BenchmarkTask) else None
    for name in metrics:
        if wanted in (None, name, name.partition(",")[0]):
            return name
    raise ConfigError(f"task {task.name}: metric {wanted!r} is none of {', '.join(metrics) or 'nothing'}")


def _score(measured: Measurement) -> dict[str, Any]:
    """A score, with the standard error of the benchmark that gave it."""
    return mean_of(measured).to_dict() | ({} if measured.stderr is None else {"stderr": measured.stderr})


def _retained(row: Row, own: Row, task: Task, shown: dict[str, dict[str, Measurement]]) -> dict[str, Any]:
    merged, agent, base = (shown[name][task.name] for name in (row.name, own.name, "base"))
    gain, own_gain = retained_gain(merged, agent, base), difference(agent, base)
    is_paired = None not in (merged.scores, agent.scores, base.scores)
    # Fieller's interval is there where the agent's own gain is clear, on the prompts that all three answered
    is_clear = gain.low is not None if is_paired else own_gain.is_clear
    is_worse = own_gain.value is not None and (own_gain.value < 0) == base.higher_is_better
    note = _UNCLEAR if not is_clear else _WORSE if is_worse else None
    return {"row": row.name, "agent": own.name, "task": task.name, **gain.to_dict(), "note": note}


def _average(estimates: Sequence[Estimate]) -> Estimate:
    """Mean over tasks, which are independent of each other."""
    values = [estimate.value for estimate in estimates]
    if None in values:
        return _NONE
    mean, n = math.fsum(values) / len(values), sum(estimate.n for estimate in estimates)
    if any(estimate.high is None for estimate in estimates):
        return Estimate(mean, None, None, n)
    half_width = math.hypot(*(estimate.high - estimate.value for estimate in estimates)) / len(values)
    return Estimate(mean, mean - half_width, mean + half_width, n)


def format_evaluation(content: dict[str, Any]) -> str:
    """The evaluation as tables of plain text."""
    parts = []
    for title, lines in _tables(content):
        parts.append("\n".join([title, *align(lines, 1)]))
    return "\n\n".join([*parts, "\n".join(_notes(content))])


def markdown_evaluation(content: dict[str, Any]) -> str:
    """The evaluation as `evaluation.md`."""
    parts = [f"# Evaluation of {escape_markdown(content['base_model'])} and what was made of it"]
    for title, lines in _tables(content):
        rows = [[escape_markdown(cell) for cell in line] for line in lines]
        parts.append("\n".join([f"## {title}", "", *markdown_table(rows, 1)]))
    return "\n\n".join([*parts, "\n".join(f"- {escape_markdown(note)}" for note in _notes(content))]) + "\n"


def _tables(content: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    tasks, rows = content["tasks"], content["rows"]
    has_mean = len(tasks) > 1 and _is_comparable(content)
    header = ["", *tasks, *(["mean"] if has_mean else [])]

    def table(of_task: str, of_mean: str, is_signed: bool, kinds: tuple[str, ...]) -> list[list[str]]:
        lines = [header]
        for name, row in rows.items():
            if row["kind"] not in kinds:
                continue
            cells = [row["tasks"][task][of_task][tasks[task]["metric"]] for task in tasks]
            cells += [row[of_mean]] if has_mean else []
            texts = [_cell(cell, is_signed) for cell in cells]
            for column, task in enumerate(tasks.values()):
                # a mark, or room for it
                texts[column] += "" if task["agent"] is None else "*" if task["agent"] == row["agent"] else " "
            lines.append([name, *texts])
        return lines

    tables = [("Score", table("metrics", "mean", False, ("base", "agent", "merged")))]
    tables.append(("Difference to the base", table("difference", "mean_difference", True, ("agent", "merged"))))
    if content["retained_gain"]:
        lines = [["", "agent", "task", "retained gain", "95 %"]]
        for gain in content["retained_gain"]:
            value = "-" if gain["value"] is None else f"{gain['value']:.1%}"
            interval = "none" if gain["interval"] is None else "{:.1%} to {:.1%}".format(*gain["interval"])
            mark = f" ({_MARKS[gain['note']]})" if gain["note"] else ""
            lines.append([gain["row"], gain["agent"], gain["task"], value, interval + mark])
        tables.append(("Retained gain: (merged - base) / (agent - base)", lines))
    return tables


def _cell(estimate: dict[str, Any], is_signed: bool) -> str:
    if estimate["value"] is None:
        return "-"
    text = f"{estimate['value']:{'+' if is_signed else ''}.3f}"
    return text if estimate["interval"] is None else f"{text} +-{estimate['interval'][1] - estimate['value']:.3f}"


def _notes(content: dict[str, Any]) -> list[str]:
    metrics = ", ".join(f"{name}: {task['metric']}" for name, task in content["tasks"].items())
    notes = [f"Metrics: {metrics}. +-: half of the 95 % interval over prompts; differences are paired by prompt."]
    if any(task["agent"] for task in content["tasks"].values()):
        notes.append("A star marks an agent on its own task.")
    if lower := [name for name, task in content["tasks"].items() if not task["higher_is_better"]]:
        without = "" if _is_comparable(content) else "; so there is no mean over the tasks"
        notes.append(f"Lower is better: {', '.join(lower)}{without}.")
    found = {gain["note"] for gain in content["retained_gain"]}
    notes += [f"({mark}): {note}: the ratio says nothing." for note, mark in _MARKS.items() if note in found]
    notes += [f"Not measured: {name}: {problem}" for name, problem in content["failed"].items()]
    return notes


def _is_comparable(content: dict[str, Any]) -> bool:
    """Whether scores of all tasks point the same way, so that their mean says something."""
    return len({task["higher_is_better"] for task in content["tasks"].values()}) == 1
