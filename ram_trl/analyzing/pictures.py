"""The pictures of an analysis, drawn with matplotlib from the content of `analysis.json`."""

import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure

from ..picture_style import INK, PICTURE_STYLE
from .colours import PALETTE, agent_colours


__all__ = ["PICTURES", "draw"]

_LINES = ["-", "--", ":", "-."]
_WIDTH = 8.0
# More layers than this are named in steps.
_MAX_LABELS = 20
# Matrices of more agents than this are drawn one below the other.
_MOST_BESIDE = 7


def draw(data: dict[str, Any], name: str) -> dict[str, bytes]:
    """One picture as files, the same bytes every time.

    Args:
        data (`dict[str, Any]`):
            Content of `analysis.json`.
        name (`str`):
            One of `PICTURES`.

    Returns:
        `dict[str, bytes]`: by kind, `"png"` and `"svg"`.
    """
    files = {}
    with _style(name):
        figure = PICTURES[name](data)
        for kind, stable in (("png", {"Software": None}), ("svg", {"Date": None})):
            file = io.BytesIO()
            figure.savefig(file, format=kind, dpi=160, metadata=stable)
            # where everything goes was found for the first kind, which takes most of the time
            figure.set_layout_engine("none")
            files[kind] = file.getvalue()
    return files


@contextmanager
def _style(salt: str) -> Iterator[None]:
    salted = {"svg.fonttype": "none", "svg.hashsalt": salt, "font.family": "sans-serif"}
    with matplotlib.rc_context({**PICTURE_STYLE, **salted}):
        yield


def _density(data: dict[str, Any]) -> Figure:
    agents, colours = data["agents"], agent_colours(data)
    figure = Figure(figsize=(_WIDTH, 0.8 + 0.38 * len(agents)), layout="constrained")
    axes = figure.subplots()
    labels = [agent["label"] for agent in agents]
    shares = [100 * agent["density"] for agent in agents]
    bars = axes.barh(range(len(agents)), shares, 0.68, color=[colours[label] for label in labels])
    axes.bar_label(bars, [_percent(share) for share in shares], padding=3)
    _names_at_the_left(axes, labels)
    axes.set_xlim(0, max(*shares, 1e-9) * 1.14)
    axes.set_xlabel(f"% of the model's parameters changed by more than {data['epsilon']:g}")
    return figure


def _overlaps(data: dict[str, Any]) -> Figure:
    agents = data["agents"]
    figure = Figure(figsize=(_WIDTH, 1.35 + 0.38 * len(agents)), layout="constrained")
    axes = figure.subplots()
    tones = matplotlib.colormaps["cividis_r"]
    left = [0.0] * len(agents)
    for others in range(len(agents)):
        widths = [100 * agent["shared_with"][others] / max(1, agent["changed"]) for agent in agents]
        tone = tones(0.08 + 0.84 * others / max(1, len(agents) - 1))
        bars = axes.barh(range(len(agents)), widths, 0.68, left=left, color=tone, label=_with_others(others))
        texts = [f"{width:.0f}" if width >= 4 else "" for width in widths]
        axes.bar_label(bars, texts, label_type="center", color=_readable_on(tone), fontsize=8.5)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    _names_at_the_left(axes, [agent["label"] for agent in agents])
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the agent's changes, by how many other agents changed the same parameter")
    figure.legend(loc="outside upper left", ncols=min(6, len(agents)), handlelength=1.1, columnspacing=1.4)
    return figure


def _with_others(others: int) -> str:
    return "alone (unique)" if others == 0 else f"with {others} other{'s' if others > 1 else ''}"


def _pairs(data: dict[str, Any]) -> Figure:
    """Three matrices in the order of likeness."""
    labels = data["order"]
    changed = {agent["label"]: agent["changed"] for agent in data["agents"]}
    overlap, signs, cosines = ({(label, label): None for label in labels} for _ in range(3))
    for pair in data["pairs"]:
        for first, second in (pair["agents"], pair["agents"][::-1]):
            overlap[first, second] = pair["overlap"] / changed[first] if changed[first] else None
            signs[first, second], cosines[first, second] = pair["sign_agreement"], pair["cosine"]
    side, beside = max(2.7, 0.48 * len(labels) + 0.2), 0.3 + 0.075 * max(map(len, labels))
    across = len(labels) <= _MOST_BESIDE
    size = (beside + 3 * side, side + beside) if across else (beside + side, 3 * (side + beside))
    figure = Figure(figsize=size, layout="compressed")
    panels = figure.subplots(1, 3, sharey=True) if across else figure.subplots(3, 1)
    bound = max([0.1, *(abs(value) for value in cosines.values() if value is not None)])
    _matrix(panels[0], labels, overlap, "Overlap, % of the row's changes", "Blues", (0, 1), 100, "{:.0f}")
    _matrix(panels[1], labels, signs, "Same sign in the overlap, %", "PuOr_r", (0, 1), 100, "{:.0f}")
    _matrix(panels[2], labels, cosines, "Cosine of the updates", "PuOr_r", (-bound, bound), 1, "{:.2f}")
    return figure


def _matrix(
    axes: Axes,
    labels: list[str],
    values: dict[tuple[str, str], float | None],
    title: str,
    colours: str,
    limits: tuple[float, float],
    scale: float,
    form: str,
) -> None:
    grid = [[math.nan if values[row, column] is None else values[row, column] for column in labels] for row in labels]
    image = _cells(axes, grid, colours, limits)
    axes.set_aspect("equal")
    for y, row in enumerate(grid):
        for x, value in enumerate(row):
            text = "" if math.isnan(value) else form.format(scale * value).replace("-0.00", "0.00")
            axes.text(
                x + 0.5,
                y + 0.52,
                text,
                ha="center",
                va="center",
                color=_readable_on(image.to_rgba(value)),
                fontsize=8.5,
            )
    middles = [at + 0.5 for at in range(len(labels))]
    axes.set_xticks(middles, labels, rotation=35, ha="right", rotation_mode="anchor")
    axes.set_yticks(middles, labels)
    axes.set_title(title, fontsize=9.5)


def _cells(axes: Axes, grid: list[list[float]], colours: str, limits: tuple[float, float]) -> QuadMesh:
    """A table of colours, the first row on top; drawn as shapes, which stay sharp at any size."""
    image = axes.pcolormesh(grid, cmap=colours, vmin=limits[0], vmax=limits[1], edgecolors="face", linewidth=0.5)
    # not invert_yaxis, which axes that share it would undo in turn
    axes.set_ylim(len(grid), 0)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return image


def _layers(data: dict[str, Any]) -> Figure:
    """A heat map for every agent: layers to the right, kinds of modules downwards."""
    agents, cells = data["agents"], data["cells"]
    # a module outside of the layers fills the column at its place
    columns = list(dict.fromkeys((c["stack"], c["layer"], c["module"] if c["layer"] is None else None) for c in cells))
    rows = list(dict.fromkeys(cell["module"] for cell in cells if cell["layer"] is not None)) or [""]
    across = min(2, len(agents))
    down = -(-len(agents) // across)
    height = 1.5 + down * (0.45 + max(0.7, 0.155 * len(rows)))
    figure = Figure(figsize=(_WIDTH * 1.2, height), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    highest = max((share or 0.0 for cell in cells for share in cell["density"]), default=0.0)
    shown = [at for at, column in enumerate(columns) if _is_named(column, len(columns))]
    for at, axes in enumerate(panels.flat):
        if at >= len(agents):
            axes.set_visible(False)
            continue
        grid = _heat(cells, at, rows, columns)
        image = _cells(axes, grid, "Blues", (0, 100 * highest or 1))
        axes.set_title(agents[at]["label"])
        axes.tick_params(labelsize=7.5)
        axes.set_yticks([y + 0.5 for y in range(len(rows))], rows)
        axes.set_xticks([x + 0.5 for x in shown], [_column_name(columns[x], data) for x in shown], rotation=90)
        axes.tick_params(labelbottom=at + across >= len(agents))
    label = "% of the parameters changed"
    bar = figure.colorbar(image, ax=panels, location="bottom", shrink=0.5, aspect=45, pad=0.02, label=label)
    bar.outline.set_visible(False)
    # shapes, too: a page shows no image from inside an SVG
    bar.solids.set(rasterized=False, edgecolor="face")
    return figure


def _is_named(column: tuple[str, int | None, str | None], num_columns: int) -> bool:
    """Whether there is room for the name of a column."""
    layer = column[1]
    return layer is None or layer % -(-num_columns // _MAX_LABELS) == 0


def _column_name(column: tuple[str, int | None, str | None], data: dict[str, Any]) -> str:
    stack, layer, module = column
    if layer is None:
        return module
    has_many_stacks = len({layer["stack"] for layer in data["layers"]}) > 1
    return f"{stack} {layer}" if has_many_stacks else str(layer)


def _heat(cells: list[dict[str, Any]], at: int, rows: list[str], columns: list[tuple]) -> list[list[float]]:
    """Densities in per cent."""
    inside = {(cell["stack"], cell["layer"], cell["module"]): cell["density"][at] for cell in cells}
    grid = []
    for row in rows:
        shares = [inside.get((stack, layer, module or row)) for stack, layer, module in columns]
        grid.append([math.nan if share is None else 100 * share for share in shares])
    return grid


def _epsilons(data: dict[str, Any]) -> Figure:
    """What each threshold leaves: density, unique share, and the magnitude that it ignores."""
    figure = Figure(figsize=(_WIDTH, 3.1), layout="constrained")
    panels = figure.subplots(1, 3, sharex=True)
    curves = (
        ("density", "Changed, % of the model"),
        ("unique_share", "Unique, % of the changes"),
        ("lost_magnitude", "Ignored, % of magnitude"),
    )
    colours = agent_colours(data)
    for axes, (key, title) in zip(panels, curves, strict=True):
        for at, agent in enumerate(data["agents"]):
            steps = [step for step in agent["by_epsilon"] if step[key] is not None and step["epsilon"] > 0]
            axes.plot(
                [step["epsilon"] for step in steps],
                [100 * step[key] for step in steps],
                _LINES[at // len(PALETTE) % len(_LINES)],
                color=colours[agent["label"]],
                marker="o",
                markersize=3.5,
                linewidth=1.5,
                label=agent["label"] if key == "density" else None,
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda epsilon, _: f"{epsilon:.0e}".replace("e-0", "e-"))
        axes.set_ylim(bottom=0)
        axes.set_title(title, fontsize=9.5)
        axes.grid(axis="y", color=INK, alpha=0.12, linewidth=0.6)
        axes.axvline(data["epsilon"] or math.nan, color=INK, linewidth=0.8, alpha=0.5)
        axes.set_xlabel("epsilon")
    figure.legend(loc="outside upper left", ncols=min(6, len(data["agents"])), handlelength=1.6, columnspacing=1.4)
    return figure


def _magnitudes(data: dict[str, Any]) -> Figure:
    """How large unique and shared changes are on average."""
    agents, colours = data["agents"], agent_colours(data)
    figure = Figure(figsize=(_WIDTH, 1.2 + 0.5 * len(agents)), layout="constrained")
    axes = figure.subplots()
    for offset, part, alpha in ((-0.19, "unique", 1.0), (0.19, "shared", 0.45)):
        means = [agent["magnitude"][part]["mean"] or 0.0 for agent in agents]
        bars = axes.barh(
            [at + offset for at in range(len(agents))],
            means,
            0.36,
            color=[colours[agent["label"]] for agent in agents],
            alpha=alpha,
        )
        axes.bar_label(bars, [f"{part} {mean:.2g}" if mean else "" for mean in means], padding=3, fontsize=8.5)
    _names_at_the_left(axes, [agent["label"] for agent in agents])
    axes.set_xlim(0, 1.2 * max(1e-30, *(bar.get_width() for bar in axes.patches)))
    axes.ticklabel_format(axis="x", style="sci", scilimits=(-2, 3))
    axes.set_xlabel("mean |delta|: solid where the agent is alone, pale where it shares")
    return figure


def _names_at_the_left(axes: Axes, labels: list[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _readable_on(colour: tuple[float, ...]) -> str:
    red, green, blue = colour[:3]
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "#ffffff"


def _percent(share: float) -> str:
    return f"{share:.1f} %" if share >= 0.95 else f"{share:.2g} %"


# Every picture of an analysis, by the name of its files.
PICTURES: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "density": _density,
    "overlaps": _overlaps,
    "pairs": _pairs,
    "layers": _layers,
    "epsilons": _epsilons,
    "magnitudes": _magnitudes,
}
