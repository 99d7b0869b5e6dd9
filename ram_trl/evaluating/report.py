"""The tables of an evaluation: scores, differences to the base, retained gains; as data, as text and as Markdown."""

import math
from collections.abc import Sequence
from typing import Any

from ..table import align
from ..version import __version__
from .rows import Row
from .statistics import Estimate, Measurement, difference, mean_of, retained_gain
from .tasks import RewardTask, Task


__all__ = ["build_evaluation", "format_evaluation", "markdown_evaluation"]

_UNCLEAR = "the agent's own gain is not distinguishable from 0"


def build_evaluation(
    rows: Sequence[Row],
    tasks: Sequence[Task],
    results: dict[str, dict[str, dict[str, Any]]],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Content of `evaluation.json`.

    Args:
        rows (`Sequence[Row]`):
            Rows, the base first.
        tasks (`Sequence[Task]`):
            Tasks.
        results (`dict`):
            By row and task, what was measured.
        settings (`dict`):
            What else to record.
    """
    measured = {
        row: {
            task: {metric: Measurement(**values) for metric, values in result["metrics"].items()}
            for task, result in by_task.items()
        }
        for row, by_task in results.items()
    }
    shown = {row: {task: next(iter(metrics.values())) for task, metrics in by.items()} for row, by in measured.items()}
    content = {
        "ram_trl_version": __version__,
        **settings,
        "intervals": "95 %, Student t over prompts; differences paired by prompt; retained gain by Fieller's theorem",
        "tasks": {
            task.name: {
                "kind": "reward" if isinstance(task, RewardTask) else "benchmark",
                "metric": next(iter(measured["base"][task.name])),
                "agent": task.agent,
            }
            for task in tasks
        },
        "rows": {},
        "retained_gain": [],
    }
    for row in rows:
        cells = {}
        for task in tasks:
            metrics, seconds = measured[row.name][task.name], results[row.name][task.name]["seconds"]
            reference = measured["base"][task.name]
            cells[task.name] = {
                "seconds": seconds,
                "metrics": {name: _score(metric) for name, metric in metrics.items()},
                "difference": {
                    name: difference(metric, reference[name]).to_dict() for name, metric in metrics.items()
                },
            }
        scores = [mean_of(shown[row.name][task.name]) for task in tasks]
        gains = [difference(shown[row.name][task.name], shown["base"][task.name]) for task in tasks]
        content["rows"][row.name] = {
            "kind": row.kind,
            "agent": row.agent,
            "tasks": cells,
            "mean": _average(scores).to_dict(),
            "mean_difference": _average(gains).to_dict(),
        }
    for row in rows:
        content["retained_gain"] += [
            _retained(row, own, task, shown)
            for task in tasks
            for own in rows
            if row.kind == "merged" and own.agent is not None and own.agent == task.agent
        ]
    return content


def _score(measured: Measurement) -> dict[str, Any]:
    """A score, with the standard error of the benchmark that gave it."""
    return mean_of(measured).to_dict() | ({} if measured.stderr is None else {"stderr": measured.stderr})


def _retained(row: Row, own: Row, task: Task, shown: dict[str, dict[str, Measurement]]) -> dict[str, Any]:
    merged, agent, base = (shown[name][task.name] for name in (row.name, own.name, "base"))
    is_clear = difference(agent, base).is_clear
    gain = retained_gain(merged, agent, base)
    note = None if is_clear else _UNCLEAR
    return {"row": row.name, "agent": own.name, "task": task.name, **gain.to_dict(), "note": note}


def _average(estimates: Sequence[Estimate]) -> Estimate:
    """Mean over tasks, which are independent of each other."""
    values = [estimate.value for estimate in estimates]
    if None in values:
        return Estimate(None, None, None, 0)
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
    parts = [f"# Evaluation of {content['base_model']} and what was made of it"]
    for title, lines in _tables(content):
        rows = [f"| {' | '.join(cell.strip().replace('*', chr(92) + '*') for cell in line)} |" for line in lines]
        rows.insert(1, f"|---|{'---:|' * (len(lines[0]) - 1)}")
        parts.append("\n".join([f"## {title}", "", *rows]))
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in _notes(content))]) + "\n"


def _tables(content: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    tasks, rows = content["tasks"], content["rows"]
    header = ["", *tasks, *(["mean"] if len(tasks) > 1 else [])]

    def table(of_task: str, of_mean: str, is_signed: bool, kinds: tuple[str, ...]) -> list[list[str]]:
        lines = [header]
        for name, row in rows.items():
            if row["kind"] not in kinds:
                continue
            cells = [row["tasks"][task][of_task][tasks[task]["metric"]] for task in tasks] + [row[of_mean]] * (
                len(tasks) > 1
            )
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
            lines.append(
                [gain["row"], gain["agent"], gain["task"], value, interval + (" (a)" if gain["note"] else "")]
            )
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
    if any(gain["note"] for gain in content["retained_gain"]):
        notes.append(f"(a): {_UNCLEAR}: the ratio says nothing.")
    return notes
