"""A sweep: many merges of the same agents, each evaluated in memory, and the best of them."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..merging.plan import MergeSettings
from ..options import read_yaml
from ..table import align


__all__ = ["best_configuration", "format_sweep", "markdown_sweep", "read_grid", "sweep_lines"]

# Merges that nobody means to evaluate.
_MOST = 10_000
# What does not change a merge.
_NOT_SWEPT = ("engine",)


def read_grid(path: str) -> dict[str, dict[str, Any]]:
    """Read a YAML file of lists, and give every combination of their members.

    Args:
        path (`str`):
            File with options of [`apply_merge`], each a list of values: `r: [0.0, 0.1]`,
            `agents: [[math, code], [math, code, tool]]`, `weights: [{}, {tool: 0.5}]`.

    Returns:
        `dict[str, dict]`: settings of the merges, by a name that says what varies.

    Raises:
        ConfigError: naming what no merge could use.
    """
    if not Path(path).is_file():
        raise ConfigError(f"grid: {path} is not a file of options")
    try:
        content = read_yaml(path)
    except ConfigError as error:
        raise ConfigError(f"grid: {path} cannot be read: {error}") from error
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"grid: {path} holds no options (name: list of values)")
    known = ["agents", *(f.name for f in dataclasses.fields(MergeSettings) if f.name not in _NOT_SWEPT)]
    for option, values in content.items():
        if option not in known:
            raise ConfigError(f"grid: unknown option {option!r}; known are: {', '.join(known)}")
        if not isinstance(values, list) or not values:
            raise ConfigError(f"grid: {option}={values!r} is not a list of values")
    varying = [option for option, values in content.items() if len(values) > 1]
    merges = {}
    for values in itertools.product(*content.values()):
        settings = dict(zip(content, values, strict=True))
        MergeSettings(**{option: value for option, value in settings.items() if option != "agents"})
        agents = settings.get("agents", ["any"])
        if not isinstance(agents, list) or not agents or not all(isinstance(agent, str) for agent in agents):
            raise ConfigError(f"grid: agents={agents!r} is not a list of names: write [[math, code], [math, tool]]")
        merges[" ".join(f"{option}={_short(settings[option])}" for option in varying) or "merge"] = settings
        if len(merges) > _MOST:
            raise ConfigError(f"grid: {path} describes more than {_MOST:,} merges")
    return merges


def best_configuration(content: dict[str, Any], merges: dict[str, dict[str, Any]]) -> str:
    """Name of the merge with the highest mean score over the tasks; of equal ones the first.

    Raises:
        ConfigError: if none of them has a score in every task.
    """
    means = {name: content["rows"][name]["mean"]["value"] for name in merges}
    scored = {name: mean for name, mean in means.items() if mean is not None}
    if not scored:
        raise ConfigError("no merge has a score in every task: see evaluation.json")
    return max(scored, key=scored.__getitem__)


def sweep_lines(content: dict[str, Any], merges: dict[str, dict[str, Any]]) -> list[list[str]]:
    """A line for each merge, as in table 2 of the paper: scores, their mean, what is kept of the agents' gains."""
    tasks, best = content["tasks"], best_configuration(content, merges)
    lines = [["", *tasks, "mean", "+-", "retained gain"]]
    for name in merges:
        row = content["rows"][name]
        cells = [row["tasks"][task]["metrics"][tasks[task]["metric"]]["value"] for task in tasks]
        mean, interval = row["mean"]["value"], row["mean"]["interval"]
        gains = [gain["value"] for gain in content["retained_gain"] if gain["row"] == name and gain["note"] is None]
        known = [gain for gain in gains if gain is not None]
        lines.append(
            [
                f"{name} *" if name == best else name,
                *(_number(cell) for cell in [*cells, mean]),
                _number(interval and interval[1] - mean),
                f"{sum(known) / len(known):.1%}" if known else "-",
            ]
        )
    return lines


def format_sweep(lines: list[list[str]]) -> str:
    """The sweep as a table of plain text."""
    return "\n".join(align(lines, 1))


def markdown_sweep(lines: list[list[str]]) -> str:
    """The sweep as a table in Markdown."""
    rows = [f"| {' | '.join(cell.replace('*', chr(92) + '*') for cell in line)} |" for line in lines]
    rows.insert(1, f"|---|{'---:|' * (len(lines[0]) - 1)}")
    return "\n".join(rows) + "\n"


def _short(value: Any) -> str:
    """A value in a name, which is the name of a directory too."""
    if isinstance(value, dict):
        return ",".join(f"{key}:{_short(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        return "+".join(map(_short, value))
    return f"{value:g}" if isinstance(value, float) else str(value).replace("/", "_")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
