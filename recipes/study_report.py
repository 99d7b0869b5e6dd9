"""The study as tables in Markdown and as a picture."""

import math
from pathlib import Path
from typing import Any

from study_summary import MIN_GAIN, NUM_ERRORS, OURS, OURS_SEARCHED, SEARCHED, sort_methods


COLOURS = {2: "#56B4E9", 3: "#E69F00", 5: "#0072B2"}
# Left edge of the picture, %.
LOWEST = -50

COMPARED = {
    "best": "RAM+ against the best other method at its defaults",
    "ram": "RAM+ against RAM",
    "searched": f"{OURS_SEARCHED}, against {SEARCHED}",
}
NOTES = f"""\
Greedy exact match on {{num_prompts}} held-out prompts a task; means over seeds, +- their standard error.
Retained: (merged - base) / (agent - base) of each agent on its own task, its mean over the agents of a set, then over
the sets of N agents. An agent that gained less than {100 * MIN_GAIN:.0f} points is left out of it.
Own tasks, all tasks: accuracy on the tasks of the set, on all tasks.
RAM+ wins or loses where the paired difference over seeds is more than {NUM_ERRORS} of its standard errors."""


def format_markdown(results: dict[str, Any]) -> str:
    """The report."""
    lines = ["# Study of merge methods", "", *NOTES.format(num_prompts=results["num_prompts"]).splitlines()]
    lines += ["", "## Agents", "", *agents_table(results)]
    lines += ["", "## RAM+ against the others: retained gain, points", "", *comparison_table(results), ""]
    lines += [sentence for key in COMPARED for sentence in in_words(results, key)]
    for name, regime in results["regimes"].items():
        lines += ["", f"## {name}: %", "", *methods_table(regime)]
    if results["timing"]:
        lines += ["", "## Time and memory", "", "| method | seconds | CPU seconds | peak MB |", "|---|---:|---:|---:|"]
        for method, run in results["timing"].items():
            cells = f"{run['seconds']:.1f} | {run['cpu_seconds']:.1f} | {run['peak_bytes'] / 1e6:.0f}"
            lines.append(f"| `{method}` | {cells} |")
    return "\n".join(lines) + "\n"


def agents_table(results: dict[str, Any]) -> list[str]:
    lines = [
        "| regime | seeds | density, % | base, % | agent on its own task, % | gain | other tasks | left out |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, regime in results["regimes"].items():
        agents, (low, high) = regime["agents"], regime["densities"]
        cells = [f"{len(regime['cells'])}", f"{percent(agents['density'])} ({100 * low:.0f} to {100 * high:.0f})"]
        cells += [percent(regime["base"]), *(percent(agents[key]) for key in ("accuracy", "gain", "others"))]
        lines.append(f"| {name} | {' | '.join(cells)} | {regime['left_out']} |")
    return lines


def comparison_table(results: dict[str, Any]) -> list[str]:
    lines = [
        "| regime | N | best other at its defaults | RAM+ minus it | RAM+ minus RAM "
        f"| {OURS_SEARCHED}, minus {SEARCHED} |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for name, regime in results["regimes"].items():
        for number, comparisons in regime["comparisons"].items():
            cells = [f"`{comparisons['best']['rival']}`" if "best" in comparisons else "-"]
            for key in COMPARED:
                one = comparisons.get(key)
                cells.append(f"{percent(one)} {one['verdict']}" if one else "-")
            lines.append(f"| {name} | {number} | {' | '.join(cells)} |")
    return lines


def in_words(results: dict[str, Any], key: str) -> list[str]:
    """What the comparisons with one rival say, each verdict with its regimes and numbers of agents."""
    places: dict[str, dict[str, list[int]]] = {}
    for name, regime in results["regimes"].items():
        for number, comparisons in regime["comparisons"].items():
            if key in comparisons:
                places.setdefault(comparisons[key]["verdict"], {}).setdefault(name, []).append(number)
    said = [
        f"{verdict}: " + "; ".join(f"{name} N={', '.join(map(str, numbers))}" for name, numbers in regimes.items())
        for verdict, regimes in places.items()
    ]
    return [f"- {COMPARED[key]}. {'. '.join(said)}."] if said else []


def methods_table(regime: dict[str, Any]) -> list[str]:
    """Rows are methods; columns the retained gain and the accuracies by number of agents, the best bold."""
    columns = [(key, number) for key in ("retained", "own", "all") for number in regime["numbers"]]
    titles = {"retained": "retained", "own": "own tasks", "all": "all tasks"}
    lines = [
        f"| method | {' | '.join(f'{titles[key]}, N={number}' for key, number in columns)} |",
        f"|---|{'---:|' * len(columns)}",
    ]
    best: dict[tuple[str, int], float] = {}
    for found in regime["merges"].values():
        for key, number in columns:
            if number in found[key]:
                best[key, number] = max(found[key][number]["mean"], best.get((key, number), -math.inf))
    for method, found in regime["merges"].items():
        cells = []
        for key, number in columns:
            figure = found[key].get(number)
            text = "-" if figure is None else percent(figure)
            cells.append(f"**{text}**" if figure and figure["mean"] == best[key, number] else text)
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    return lines


def percent(figure: dict[str, Any]) -> str:
    error = "" if figure["error"] is None else f" +-{100 * figure['error']:.1f}"
    return f"{100 * figure['mean']:.1f}{error}"


def plot(results: dict[str, Any], path: Path) -> None:
    """Draws the retained gain: a panel for each regime, a line for each method, a dot for each number of agents."""
    from matplotlib.figure import Figure

    regimes = results["regimes"]
    order = sort_methods(results)
    picture = Figure(figsize=(3 + 2.6 * len(regimes), 1.6 + 0.32 * len(order)), layout="constrained")
    panels = picture.subplots(1, len(regimes), sharey=True, squeeze=False)[0]
    for axes, (name, regime) in zip(panels, regimes.items(), strict=True):
        axes.axvline(100, color="#999999", linewidth=1, linestyle=":")
        if OURS in order:
            axes.axhspan(order.index(OURS) - 0.5, order.index(OURS) + 0.5, color="#009E73", alpha=0.15, linewidth=0)
        for number in regime["numbers"]:
            figures = [regime["merges"].get(method, {}).get("retained", {}).get(number) for method in order]
            shown = [(row, figure) for row, figure in enumerate(figures) if figure]
            axes.errorbar(
                [max(100 * figure["mean"], LOWEST) for _, figure in shown],
                [row for row, _ in shown],
                xerr=[100 * (figure["error"] or 0) for _, figure in shown],
                fmt="o",
                color=COLOURS.get(number, "#000000"),
                label=f"{number} agents",
            )
        axes.set_xlim(max(axes.get_xlim()[0], LOWEST - 3), max(axes.get_xlim()[1], 105))
        density = 100 * regime["agents"]["density"]["mean"]
        axes.set_title(f"{name}: {density:.0f} % changed", fontsize=10)
        axes.grid(axis="y", color="#eeeeee")
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(left=False)
    panels[0].set_yticks(range(len(order)), order)
    panels[0].set_ylim(len(order) - 0.5, -0.5)
    for label in panels[0].get_yticklabels():
        label.set_fontweight("bold" if label.get_text() == OURS else "normal")
    edge = f"at the edge: {LOWEST} or less"
    picture.supxlabel(
        f"% of an agent's gain that the merged model keeps\n(100: as good as the agent; {edge})", fontsize=10
    )
    handles, labels = panels[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside upper right", ncols=len(labels), frameon=False)
    picture.savefig(path, dpi=150)
