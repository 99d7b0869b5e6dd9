"""The picture of a sweep, drawn with matplotlib: of a grid every merge, of a search how it went and what it found."""

import io
import math
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from ..evaluating.statistics import Estimate
from ..picture_style import PICTURE_STYLE
from .result import SweepResult, score_of
from .space import Choices


__all__ = ["draw_sweep"]

_BLUE, _ORANGE, _GREY, _PALE = "#0072B2", "#D55E00", "#999999", "#e6e6e6"
_WIDTH = 9.0
# A picture with more merges than this shows the best of them.
_MOST_ROWS = 50
# Letters of a name that are shown.
_LONGEST = 90
# Small pictures, one for each option of a search, in a row.
_COLUMNS = 3
# Names of choices that are longer than this together are written aslant.
_MOST_LETTERS = 22


def draw_sweep(result: SweepResult) -> bytes:
    """A picture of what came out so far.

    Args:
        result ([`~ram_trl.sweeping.result.SweepResult`]):
            What came out.

    Returns:
        `bytes`: a PNG, the same bytes every time.
    """
    with matplotlib.rc_context(PICTURE_STYLE):
        figure = _search(result) if result.is_search else _grid(result)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=150, metadata={"Software": None})
    return file.getvalue()


def _grid(result: SweepResult) -> Figure:
    """Every merge with its interval, one below the other."""
    shown = set(result.ranked[:_MOST_ROWS])
    names = [name for name in result.trials if name in shown]
    longest = max(map(len, names), default=0)
    width = _WIDTH + 0.06 * max(0, min(longest, _LONGEST) - 35)
    figure = Figure(figsize=(width, 1.4 + 0.3 * max(1, len(names))), layout="constrained")
    axes = figure.subplots()
    for at, name in enumerate(names):
        _dot(axes, score_of(result.content, name), at, _ORANGE if name == result.best else _BLUE)
    _base_line(axes.axvline, result)
    axes.set_yticks(range(len(names)), [_shortened(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="x", color=_PALE, linewidth=0.7)
    axes.set_axisbelow(True)
    _legend(axes)
    left_out = len(result.ranked) - len(names)
    title = f"{len(names)} best of {len(result.ranked):,} merges" if left_out else f"{len(names)} merges"
    axes.set_title(f"{title}; {len(result.unscored):,} without a score" if result.unscored else title)
    axes.set_xlabel(f"{result.measure}, with the 95 % interval")
    if _is_wide(result):
        _by_magnitude(axes, "x")
    return figure


def _search(result: SweepResult) -> Figure:
    """The scores in the order of the trials, with the best so far; and below against every option that varies."""
    options = result.space.varying
    num_rows = math.ceil(len(options) / _COLUMNS)
    figure = Figure(figsize=(_WIDTH, 3.1 + 2.5 * num_rows), layout="constrained")
    cells = figure.add_gridspec(1 + num_rows, _COLUMNS, height_ratios=[3.1, *[2.5] * num_rows])
    top = figure.add_subplot(cells[0, :])
    _history(top, result)
    for at, option in enumerate(options):
        axes = figure.add_subplot(cells[1 + at // _COLUMNS, at % _COLUMNS], sharey=top)
        _against(axes, result, option)
        if at % _COLUMNS:
            axes.tick_params(labelleft=False)
    if _is_wide(result):
        _by_magnitude(top, "y")
    return figure


def _history(axes: Axes, result: SweepResult) -> None:
    better, best, so_far = (max if result.higher_is_better else min), None, []
    for number, (name, trial) in enumerate(result.trials.items(), 1):
        if trial.score is None:
            axes.plot(number, 0.02, "x", color=_GREY, markersize=5, transform=axes.get_xaxis_transform())
        else:
            best = trial.score if best is None else better(best, trial.score)
            _dot(axes, score_of(result.content, name), number, _BLUE, is_upright=True)
        so_far.append(math.nan if best is None else best)
    numbers = range(1, len(so_far) + 1)
    axes.plot(numbers, so_far, color=_ORANGE, linewidth=1.6, drawstyle="steps-post", label="best so far")
    _base_line(axes.axhline, result)
    if result.best is not None:
        at = list(result.trials).index(result.best) + 1
        axes.plot(at, best, "*", color=_ORANGE, markersize=13, zorder=5)
        axes.set_title(f"Trial {at} is the best of {len(result.trials)}")
    axes.set_xlabel("trial" + (" (x: no score)" if result.unscored else ""))
    axes.set_ylabel(result.measure.replace(" (", "\n("))
    axes.set_xlim(0.4, len(so_far) + 0.6)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", color=_PALE, linewidth=0.7)
    axes.set_axisbelow(True)
    _legend(axes)


def _against(axes: Axes, result: SweepResult, option: str) -> None:
    """Scores against an option, later trials darker."""
    known, count = result.space.options[option], len(result.trials)
    colours = matplotlib.colormaps["Blues"]
    for number, (name, trial) in enumerate(result.trials.items(), 1):
        if trial.score is None or option not in trial.point:
            continue
        value = trial.point[option]
        if isinstance(known, Choices):
            # a little beside each other, so that equal scores are seen
            value = known.labels().index(value) + 0.05 * (number % 7 - 3)
        if name == result.best:
            axes.plot(value, trial.score, "*", color=_ORANGE, markersize=13, zorder=3)
        else:
            axes.plot(value, trial.score, "o", color=colours(0.3 + 0.65 * number / count), markersize=5)
    if isinstance(known, Choices):
        aslant = {"rotation": 20, "ha": "right", "rotation_mode": "anchor"}
        is_long = sum(map(len, known.labels())) > _MOST_LETTERS
        axes.set_xticks(range(len(known.values)), map(_shortened, known.labels()), **(aslant if is_long else {}))
        axes.set_xlim(-0.5, len(known.values) - 0.5)
    elif known.log:
        _by_magnitude(axes, "x")
    axes.grid(axis="y", color=_PALE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_title(option)


def _dot(axes: Axes, score: Estimate, at: int, colour: str, is_upright: bool = False) -> None:
    error = None if score.low is None else [[score.value - score.low], [score.high - score.value]]
    style = {"fmt": "o", "color": colour, "markersize": 5, "elinewidth": 1}
    if is_upright:
        axes.errorbar(at, score.value, yerr=error, alpha=0.75, **style)
    else:
        axes.errorbar(score.value, at, xerr=error, capsize=3, **style)


def _base_line(draw: Any, result: SweepResult) -> None:
    base = score_of(result.content, "base")
    if base is not None:
        draw(base.value, color=_GREY, linestyle="--", linewidth=1, label="base", zorder=0)


def _is_wide(result: SweepResult) -> bool:
    """Whether scores are orders of magnitude apart, as perplexities of merges that went wrong are."""
    scores = [trial.score for trial in result.trials.values() if trial.score is not None]
    return bool(scores) and min(scores) > 0 and max(scores) > 20 * min(scores)


def _by_magnitude(axes: Axes, which: str) -> None:
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    # matplotlib's own are formulas
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _legend(axes: Axes) -> None:
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2)


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 3]}..."
