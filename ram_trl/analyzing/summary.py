"""From counts and sums to the content of `analysis.json`: shares, ratios, names. docs/ANALYSIS.md describes it."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..arithmetic.codec import is_mergeable
from ..arithmetic.ram import overlap_ratio
from ..merging.plan import MergePlan
from ..version import __version__
from .places import Place, find_place
from .statistics import ALL, SHARED, UNIQUE, Statistics, Yardstick


__all__ = ["summarise"]


def summarise(
    plan: MergePlan,
    yardstick: Yardstick,
    statistics: Statistics,
    changed_in: Mapping[str, Sequence[int]],
    total_parameters: int,
) -> dict[str, Any]:
    """What was measured, as data for JSON.

    Args:
        plan ([`~ram_trl.merging.plan.MergePlan`]):
            The agents and their base.
        yardstick ([`~ram_trl.analyzing.statistics.Yardstick`]):
            What it was measured by.
        statistics ([`~ram_trl.analyzing.statistics.Statistics`]):
            Of the whole model.
        changed_in (`Mapping[str, Sequence[int]]`):
            For every tensor that any agent changed, each agent's active elements.
        total_parameters (`int`):
            Parameters of the model, tied ones once.
    """
    settings, base = plan.settings, plan.agents[0].manifest.base_model
    sizes = {name: plan.base.tensors[name].numel for name in plan.copies_of}
    levels = _useful_levels(statistics)
    agents = [
        _agent(plan, position, yardstick, statistics, total_parameters, levels) for position in range(len(plan.agents))
    ]
    return {
        "ram_trl_version": __version__,
        "base_model": {"name": base.name, "revision": base.revision, "digest": base.digest},
        "total_parameters": total_parameters,
        "epsilon": settings.epsilon,
        "r": settings.r,
        "alpha": settings.alpha,
        "agents": agents,
        "overlap_histogram": _histogram(statistics, total_parameters),
        "pairs": [
            _pair(agents, i, j, statistics, changed_in, sizes, total_parameters)
            for i, j in itertools.combinations(range(len(agents)), 2)
        ],
        **_places(plan, changed_in, sizes),
    }


def _agent(
    plan: MergePlan, at: int, yardstick: Yardstick, statistics: Statistics, total: int, levels: int
) -> dict[str, Any]:
    agent, names = plan.agents[at], Counter(agent.name for agent in plan.agents)
    changed, unique = int(statistics.active[0, at]), int(statistics.unique[0, at])
    rho = overlap_ratio(changed - unique, unique)
    after, before = statistics.rescaled[:, at]
    products, count = statistics.products, len(plan.agents)
    return {
        "label": agent.name if names[agent.name] == 1 else str(agent),
        "name": agent.name,
        "version": agent.version,
        "kind": agent.manifest.kind,
        "stored_epsilon": agent.manifest.snapshot.epsilon,
        "moved": int(statistics.moved[at]),
        "changed": changed,
        "density": _ratio(changed, total),
        "unique": unique,
        "shared": changed - unique,
        "unique_share": _ratio(unique, changed),
        "shared_with": [int(number) for number in statistics.overlaps[at]],
        "rho": "inf" if math.isinf(rho) else rho,
        "lambda": yardstick.factors[at],
        "effective_lambda": _ratio(after, before, digits=6),
        "retained": {
            "ram_plus": _ratio(products[at, count], products[at, at]),
            "average": _ratio(products[at, :count].sum() / count, products[at, at]),
        },
        "magnitude": {
            "all": _magnitude(statistics, ALL, at, int(statistics.moved[at])),
            "unique": _magnitude(statistics, UNIQUE, at, unique),
            "shared": _magnitude(statistics, SHARED, at, changed - unique),
        },
        "by_epsilon": [
            {
                "epsilon": yardstick.epsilons[level],
                "density": _ratio(int(statistics.active[level, at]), total),
                "unique_share": _ratio(int(statistics.unique[level, at]), int(statistics.active[level, at])),
                "lost_magnitude": _lost(statistics, level, at),
            }
            for level in range(levels)
        ],
    }


def _magnitude(statistics: Statistics, row: int, at: int, elements: int) -> dict[str, Any]:
    l1 = float(statistics.l1[row, at])
    return {
        "elements": elements,
        "l1": _round(l1),
        "l2": _round(math.sqrt(statistics.squares[row, at])),
        "mean": _ratio(l1, elements),
        "largest": float(statistics.largest[row, at]),
    }


def _lost(statistics: Statistics, level: int, at: int) -> float | None:
    """Share of the agent's L1 magnitude in changes of at most an epsilon."""
    share = _ratio(statistics.kept[level, at], statistics.l1[ALL, at])
    # of two sums of the same numbers in another order the smaller may come out larger
    return None if share is None else _round(max(0.0, 1.0 - share))


def _pair(
    agents: list[dict[str, Any]],
    i: int,
    j: int,
    statistics: Statistics,
    changed_in: Mapping[str, Sequence[int]],
    sizes: Mapping[str, int],
    total: int,
) -> dict[str, Any]:
    both, changed = int(statistics.both[i, j]), [agents[i]["changed"], agents[j]["changed"]]
    products = statistics.products
    return {
        "agents": [agents[i]["label"], agents[j]["label"]],
        "overlap": both,
        "share_of_first": _ratio(both, changed[0]),
        "share_of_second": _ratio(both, changed[1]),
        "jaccard": _ratio(both, sum(changed) - both),
        "expected_overlap": _ratio(changed[0] * changed[1], total),
        "expected_overlap_by_tensor": _round(
            math.fsum(active[i] * active[j] / sizes[name] for name, active in changed_in.items())
        ),
        "same_sign": int(statistics.same_sign[i, j]),
        "sign_agreement": _ratio(int(statistics.same_sign[i, j]), both),
        "cosine": _ratio(products[i, j], math.sqrt(products[i, i]) * math.sqrt(products[j, j])),
    }


def _histogram(statistics: Statistics, total: int) -> list[int]:
    """Elements that exactly 0, 1, ..., N agents changed: each is counted once by every one of its agents."""
    columns = statistics.overlaps.sum(axis=0)
    changed_by = [int(column) // (k + 1) for k, column in enumerate(columns)]
    return [total - sum(changed_by), *changed_by]


def _places(plan: MergePlan, changed_in: Mapping[str, Sequence[int]], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Densities by layer, by kind of module, and by both."""
    cells: dict[Place, list[int]] = {}
    for name, numel in sizes.items():
        if is_mergeable(plan.base.tensors[name].dtype):
            cell = cells.setdefault(find_place(name), [0] * (len(plan.agents) + 1))
            numbers = [numel, *changed_in.get(name, [0] * len(plan.agents))]
            cell[:] = [a + b for a, b in zip(cell, numbers, strict=True)]
    order = sorted(cells, key=_reading_order)
    layers, modules = ({}, {})
    for place in order:
        for groups, key in ((layers, (place.stack, place.layer)), (modules, (place.module,))):
            if key != ("", None):
                group = groups.setdefault(key, [0] * len(cells[place]))
                group[:] = [a + b for a, b in zip(group, cells[place], strict=True)]
    return {
        "layers": [{"stack": stack, "layer": layer, **_group(cell)} for (stack, layer), cell in layers.items()],
        "modules": [{"module": module, **_group(cell)} for (module,), cell in modules.items()],
        "cells": [
            {"stack": place.stack, "layer": place.layer, "module": place.module, **_group(cells[place])}
            for place in order
        ],
    }


def _reading_order(place: Place) -> tuple:
    """From the embeddings through the layers to the head; inside a layer weights, then biases, then norms."""
    section = 0 if place.is_input else 2 if place.layer is None else 1
    kind = 2 if place.is_norm else 1 if place.module.endswith("bias") else 0
    if section == 2 and place.is_norm:
        # the last norm comes before the head
        kind = -1
    return section, place.stack, place.layer or 0, kind, place.module


def _group(cell: list[int]) -> dict[str, Any]:
    numel, *changed = cell
    return {"parameters": numel, "changed": changed, "density": [_ratio(count, numel) for count in changed]}


def _useful_levels(statistics: Statistics) -> int:
    """Thresholds that any change is beyond, and at least the first."""
    return max(1, int(statistics.active.any(axis=1).sum()))


def _ratio(part: float, whole: float, digits: int = 9) -> float | None:
    return _round(part / whole, digits) if whole else None


def _round(value: float, digits: int = 9) -> float:
    """In their last places sums depend on the processor."""
    return float(f"{value:.{digits}g}")
