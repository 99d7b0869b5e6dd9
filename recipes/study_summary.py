"""What the rows of `study_merges.py` say: gains that are retained, means over seeds, and verdicts by a rule."""

import math
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from study_merges import SEARCHES, mean_over, read_rows


# An agent that gained less on its own task is left out of the ratio, which would divide by noise.
MIN_GAIN = 0.05
# A difference is called one only beyond so many of its standard errors.
NUM_ERRORS = 2
# RAM+ is compared with the best of the others; where one of its settings is searched, with another that is.
OURS, FAMILY = "ram_plus", ("ram_plus", "ram", "ram_plus_soft")
SEARCHED, OURS_SEARCHED = (search.name for search in SEARCHES)

Rows = list[dict[str, Any]]


def summarise_cell(rows: Rows) -> dict[str, Any]:
    """
    Summarises one seed and regime.

    Args:
        rows (`Rows`):
            What `study_merges.py` wrote.

    Returns:
        `dict`: `base`, accuracy by task; `agents`, by task: `accuracy` and `gain` on the own task, `others`, the mean
        change of the other tasks, `density`; `merges`, by method and number of agents: the means over the sets of
        `retained`, the retained gain (merged - base) / (agent - base) of the agents that gained enough, `own`, the
        accuracy on the tasks of the set, and `all`, on all tasks.
    """
    [base] = [row["scores"] for row in rows if row.get("kind") == "base"]
    merged = [row for row in rows if row.get("kind") == "merge"]
    # with another epsilon an agent has another density
    at_defaults = [row for row in merged if row["method"] not in (SEARCHED, OURS_SEARCHED)]
    density = {task: agent["density"] for row in at_defaults for task, agent in row["agents"].items()}
    agents = {}
    for row in rows:
        if row.get("kind") == "agent":
            task, scores = row["task"], row["scores"]
            agents[task] = {
                "accuracy": scores[task],
                "gain": scores[task] - base[task],
                "others": mean(scores[other] - base[other] for other in base if other != task),
                "density": density[task],
            }
    sets: dict[str, dict[int, Rows]] = {}
    for row in merged:
        scores, tasks = row["scores"], row["tasks"]
        gained = [task for task in tasks if agents[task]["gain"] >= MIN_GAIN]
        figures = {"own": mean_over(scores, tasks), "all": mean_over(scores, list(base))}
        if gained:
            figures["retained"] = mean((scores[task] - base[task]) / agents[task]["gain"] for task in gained)
        sets.setdefault(row["method"], {}).setdefault(len(tasks), []).append(figures)
    merges = {
        method: {
            number: {
                key: mean(found)
                for key in ("retained", "own", "all")
                if (found := [figures[key] for figures in group if key in figures])
            }
            for number, group in sizes.items()
        }
        for method, sizes in sets.items()
    }
    return {"base": base, "agents": agents, "merges": merges}


def over_seeds(values: list[float]) -> dict[str, float | None]:
    """Mean over seeds with its standard error, which one seed does not have."""
    return {
        "mean": mean(values),
        "error": stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None,
        "seeds": len(values),
    }


def compare(ours: dict[int, float], theirs: dict[int, float]) -> dict[str, Any]:
    """The paired difference of two methods over the seeds that both have, and what may be said of it."""
    difference = over_seeds([ours[seed] - theirs[seed] for seed in ours if seed in theirs])
    if difference["error"] is None:
        verdict = "one seed"
    elif abs(difference["mean"]) <= NUM_ERRORS * difference["error"]:
        verdict = "no difference"
    else:
        verdict = "wins" if difference["mean"] > 0 else "loses"
    return difference | {"verdict": verdict}


def summarise(
    paths: dict[tuple[str, int], Path], methods: list[str], timing: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """
    Summarises the study.

    Args:
        paths (`dict[tuple[str, int], Path]`):
            Regime and seed -> the rows.
        methods (`list[str]`):
            Methods to report.
        timing (`dict[str, dict[str, float]]`):
            Method -> figures of its merge as a process.

    Returns:
        `dict`: what the tables and the picture show, and the figures of every seed.
    """
    regimes: dict[str, dict[str, Any]] = {}
    num_prompts = 0
    for (regime, seed), path in paths.items():
        rows = read_rows(path)
        num_prompts = rows[0]["num_prompts"]
        regimes.setdefault(regime, {"cells": {}})["cells"][seed] = summarise_cell(rows)
    for regime in regimes.values():
        regime |= summarise_regime(regime["cells"], [*methods, SEARCHED, OURS_SEARCHED])
    return {"num_prompts": num_prompts, "min_gain": MIN_GAIN, "regimes": regimes, "timing": timing}


def summarise_regime(cells: dict[int, dict[str, Any]], methods: list[str]) -> dict[str, Any]:
    """Summarises a regime over its seeds."""
    numbers = sorted({number for cell in cells.values() for sizes in cell["merges"].values() for number in sizes})
    agents = [agent for cell in cells.values() for agent in cell["agents"].values()]
    merges: dict[str, dict[str, dict[int, Any]]] = {}
    retained: dict[int, dict[str, dict[int, float]]] = {number: {} for number in numbers}
    for method in methods:
        found = {seed: cell["merges"][method] for seed, cell in cells.items() if method in cell["merges"]}
        if not found:
            continue
        merges[method] = {key: {} for key in ("retained", "own", "all")}
        for key, columns in merges[method].items():
            for number in numbers:
                by_seed = {seed: sizes[number][key] for seed, sizes in found.items() if key in sizes.get(number, {})}
                if by_seed:
                    columns[number] = over_seeds([*by_seed.values()])
                if by_seed and key == "retained":
                    retained[number][method] = by_seed
    return {
        "numbers": numbers,
        "left_out": sum(agent["gain"] < MIN_GAIN for agent in agents),
        "agents": {
            key: over_seeds([mean(agent[key] for agent in cell["agents"].values()) for cell in cells.values()])
            for key in ("accuracy", "gain", "others", "density")
        },
        "densities": [min(agent["density"] for agent in agents), max(agent["density"] for agent in agents)],
        "base": over_seeds([mean(cell["base"].values()) for cell in cells.values()]),
        "merges": merges,
        "comparisons": {number: comparisons_of(by_method) for number, by_method in retained.items()},
    }


def comparisons_of(retained: dict[str, dict[int, float]]) -> dict[str, Any]:
    """RAM+ against the best other method at its defaults and against RAM, and both as searched against each other."""
    ours = (*FAMILY, SEARCHED, OURS_SEARCHED)
    others = {name: mean(found.values()) for name, found in retained.items() if name not in ours}
    best = max(others, key=others.get) if others else ""
    pairs = {"best": (OURS, best), "ram": (OURS, "ram"), "searched": (OURS_SEARCHED, SEARCHED)}
    return {
        key: compare(retained[one], retained[other]) | {"rival": other}
        for key, (one, other) in pairs.items()
        if one in retained and other in retained
    }


def sort_methods(results: dict[str, Any]) -> list[str]:
    """Methods by their mean retained gain over regimes and numbers of agents, the best first."""
    means: dict[str, list[float]] = {}
    for regime in results["regimes"].values():
        for method, found in regime["merges"].items():
            means.setdefault(method, []).extend(figure["mean"] for figure in found["retained"].values())
    return sorted((method for method, found in means.items() if found), key=lambda method: -mean(means[method]))
