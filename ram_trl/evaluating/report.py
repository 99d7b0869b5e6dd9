"""The tables of an evaluation: scores, differences to the base, retained gains; as data, as text and as Markdown."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ..errors import ConfigError
from ..table import align, escape_markdown, markdown_table
from ..version import __version__
from .rows import Row
from .statistics import Estimate, Measurement, difference, mean_of, retained_gain
from .tasks import BenchmarkTask, PerplexityTask, RewardTask, Task


__all__ = [
    "HIGHER",
    "LOWER",
    "PERPLEXITY",
    "build_evaluation",
    "format_evaluation",
    "kind_of",
    "markdown_evaluation",
    "mean_over_tasks",
]

# Kinds of scores; those of one kind have a common mean.
HIGHER, LOWER, PERPLEXITY = "higher is better", "lower is better", "perplexity, lower is better"
# Where the intervals of a task come from.
_BY_PROMPT = "Student's t over prompts, differences paired by prompt"
_BY_EXAMPLE = "the delta method over examples, differences paired by example"
_BY_HARNESS = "the harness's standard error, differences as of independent samples"
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
    content = {
        "ram_trl_version": __version__,
        **settings,
        "intervals": "95 %; of each task as it says; retained gain by Fieller's theorem",
        "tasks": {
            task.name: {
                "kind": _KINDS[type(task)],
                "metric": metric[task.name],
                "higher_is_better": shown["base"][task.name].higher_is_better,
                "interval": _interval_of(task, [shown[row.name][task.name] for row in rows]),
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
        mean, gain = _means(shown[row.name], shown["base"], _common_kind(content))
        content["rows"][row.name] = {
            "kind": row.kind,
            "agent": row.agent,
            "identity": row.identity,
            "tasks": cells,
            "mean": mean.to_dict(),
            "mean_difference": gain.to_dict(),
        }
    for row in rows:
        content["retained_gain"] += [
            _retained(row, own, task, shown)
            for task in tasks
            for own in rows
            if row.kind == "merged" and own.agent is not None and own.agent == task.agent
        ]
    return content


def kind_of(task: Mapping[str, Any]) -> str:
    """Kind of a task's scores: `HIGHER`, `LOWER` or `PERPLEXITY`.

    Args:
        task (`Mapping`):
            An entry of `tasks` in `evaluation.json`.
    """
    if task["higher_is_better"]:
        return HIGHER
    return PERPLEXITY if task["kind"] == "perplexity" or "perplexity" in task["metric"] else LOWER


def mean_over_tasks(scores: Sequence[Estimate], kind: str) -> Estimate:
    """Mean of scores of one kind over tasks, which are independent of each other.

    Of perplexities it is the geometric mean, in which those of hard texts do not outweigh those of easy ones; its
    interval is that of the mean of the logarithms.

    Args:
        scores (`Sequence[Estimate]`):
            The score of each task.
        kind (`str`):
            Their kind, from [`kind_of`].

    Returns:
        [`~ram_trl.evaluating.statistics.Estimate`]: without a value if a task has no score.
    """
    if kind != PERPLEXITY or len(scores) == 1:
        return _average(scores)
    if any(score.value is None or score.value <= 0 for score in scores):
        return _NONE
    logs, n = [math.log(score.value) for score in scores], sum(score.n for score in scores)
    mean = math.fsum(logs) / len(logs)
    if any(score.low is None or score.low <= 0 for score in scores):
        return Estimate(math.exp(mean), None, None, n)
    low, high = (
        math.hypot(*(math.log(end) - log for end, log in zip(ends, logs, strict=True))) / len(logs)
        for ends in ([score.low for score in scores], [score.high for score in scores])
    )
    return Estimate(math.exp(mean), math.exp(mean - low), math.exp(mean + high), n)


def _means(
    scores: Mapping[str, Measurement], base: Mapping[str, Measurement], kind: str | None
) -> tuple[Estimate, Estimate]:
    """Mean of a row's scores over tasks, and its difference to that of the base."""
    if kind is None:
        return _NONE, _NONE
    mean, of_base = (mean_over_tasks([mean_of(one) for one in row.values()], kind) for row in (scores, base))
    if mean.value is None or of_base.value is None:
        return mean, _NONE
    if kind == PERPLEXITY:
        # to first order a geometric mean is the mean of its parts, each scaled to be as large as the whole
        scores = {task: _scaled(one, mean.value) for task, one in scores.items()}
        base = {task: _scaled(one, of_base.value) for task, one in base.items()}
    return mean, _average([difference(scores[task], base[task]) for task in scores])


def _scaled(measured: Measurement, value: float) -> Measurement:
    """A measurement in another unit, in which its mean is `value`."""
    factor = value / mean_of(measured).value
    scores = measured.scores and [None if score is None else score * factor for score in measured.scores]
    mean, stderr = (None if one is None else one * factor for one in (measured.mean, measured.stderr))
    return replace(measured, scores=scores, mean=mean, stderr=stderr)


def _interval_of(task: Task, measured: Sequence[Measurement]) -> str:
    if any(one.scores is None and one.mean is not None for one in measured):
        return _BY_HARNESS
    return _BY_EXAMPLE if isinstance(task, PerplexityTask) else _BY_PROMPT


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
    if len(estimates) == 1:
        return estimates[0]
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
    kind = _common_kind(content)
    has_mean = len(tasks) > 1 and kind is not None
    header = ["", *tasks, *(["geometric mean" if kind == PERPLEXITY else "mean"] if has_mean else [])]

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
    sources: dict[str, list[str]] = {}
    for name, task in content["tasks"].items():
        sources.setdefault(task["interval"], []).append(name)
    told = [source + (f" ({', '.join(names)})" if len(sources) > 1 else "") for source, names in sources.items()]
    notes = [f"Metrics: {metrics}. +-: half of the 95 % interval, by {'; by '.join(told)}."]
    if any(task["agent"] for task in content["tasks"].values()):
        notes.append("A star marks an agent on its own task.")
    if lower := [name for name, task in content["tasks"].items() if not task["higher_is_better"]]:
        without = "" if _common_kind(content) else "; so there is no mean over the tasks"
        notes.append(f"Lower is better: {', '.join(lower)}{without}.")
    found = {gain["note"] for gain in content["retained_gain"]}
    notes += [f"({mark}): {note}: the ratio says nothing." for note, mark in _MARKS.items() if note in found]
    notes += [f"Not measured: {name}: {problem}" for name, problem in content["failed"].items()]
    return notes


def _common_kind(content: dict[str, Any]) -> str | None:
    """Kind of the scores of all tasks, if it is one, so that their mean says something."""
    kinds = {kind_of(task) for task in content["tasks"].values()}
    return kinds.pop() if len(kinds) == 1 else None
