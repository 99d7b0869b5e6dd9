"""What the numbers say, in plain sentences: pure functions of the content of `analysis.json`.

Every rule is stated where its threshold is, and in docs/ANALYSIS.md.
"""

import itertools
from typing import Any

import numpy as np


__all__ = ["add_findings"]

# With more than this share of an agent's changes shared, hardly anything is left for RAM to preserve; a merge warns.
_MOSTLY_SHARED = 0.95
# A higher epsilon is suggested only if it costs no agent more than this share of its update's magnitude (L1).
_MOST_LOST = 0.6
# The share of the updates' magnitude that epsilon left out where RAM+ kept most (docs/RESULTS.md), and the least that
# is worth a comparison.
_BEST_LOST, _LEAST_LOST = 0.4, 0.1
# Agents whose updates have at least this cosine belong together, those with at most its negative are opposed. Updates
# of a million parameters or more that have nothing to do with each other come out within 0.01 of 0.
_RELATED = 0.1
# Overlaps this many times as large as chance makes them are worth a word.
_REMARKABLE = 1.5
# A rescale factor of which rounding leaves less than this share is said to be swallowed.
_SWALLOWED = 0.5
# ... if it was meant to add at least this.
_WORTH_KEEPING = 0.01


def add_findings(data: dict[str, Any]) -> None:
    """Add `order`, `groups`, `epsilon_suggestion` and `findings` to the data, in place.

    Args:
        data (`dict[str, Any]`):
            What [`~ram_trl.analyzing.summary.summarise`] gives.
    """
    cosines = _cosines(data)
    labels = [agent["label"] for agent in data["agents"]]
    order, groups = _cluster(cosines)
    data["order"] = [labels[at] for at in order]
    data["groups"] = [[labels[at] for at in group] for group in groups]
    suggestion = data["epsilon_suggestion"] = _suggest_epsilon(data)
    suggestion["compare"] = _epsilon_to_compare(data)
    data["findings"] = {
        "summary": [
            *_together(data),
            *_opposed(data),
            *_swallowed(data),
            suggestion["reason"],
            *_compared(suggestion["compare"]),
        ],
        "agents": [_describe(agent, len(labels)) for agent in data["agents"]],
    }


def _describe(agent: dict[str, Any], num_agents: int) -> str:
    """One agent: what it keeps and what it shares."""
    label, changed = agent["label"], agent["changed"]
    if not changed:
        return f"{label}: changed nothing by more than epsilon, so a merge takes nothing from it."
    text = f"{label}: changed {_percent(agent['density'])} of the model"
    if num_agents == 1:
        return f"{text}, and is compared with no other agent."
    text += f", {_percent(agent['unique_share'])} of that alone"
    if num_agents > 2:
        text += f", {_percent(agent['shared_with'][-1] / changed)} together with all others"
    kept, average = (_percent(agent["retained"][method]) for method in ("ram_plus", "average"))
    return f"{text}. Along its own direction RAM+ keeps {kept} of its update, a plain average {average}."


def _together(data: dict[str, Any]) -> list[str]:
    """Which agents belong together."""
    if not data["pairs"]:
        return []
    sentences = []
    for group in data["groups"]:
        if len(group) > 1:
            inside = [pair for pair in data["pairs"] if set(pair["agents"]) <= set(group)]
            cosines = [pair["cosine"] for pair in inside]
            agreement = sum(pair["same_sign"] for pair in inside) / max(1, sum(pair["overlap"] for pair in inside))
            between = f"{min(cosines):.2f}" if len(cosines) == 1 else f"{min(cosines):.2f} to {max(cosines):.2f}"
            sentences.append(
                f"{_join(group)} belong together: their updates point in related directions (cosine {between}), and "
                f"{_percent(agreement)} of what they share moved the same way."
            )
    moved = {agent["label"] for agent in data["agents"] if agent["moved"]}
    alone = [group[0] for group in data["groups"] if len(group) == 1 and group[0] in moved]
    if len(alone) == len(moved):
        largest = max((pair["cosine"] for pair in data["pairs"] if pair["cosine"] is not None), default=0.0)
        sentences.append(
            f"No two agents point in related directions (largest cosine {largest:.2f}): each learned something of its "
            "own."
        )
    elif alone:
        points = "points in a direction of its own" if len(alone) == 1 else "each point in a direction of their own"
        sentences.append(f"{_join(alone)} {points}.")
    lifts = [(_lift(pair), pair) for pair in data["pairs"] if _lift(pair) is not None]
    if lifts:
        lift, pair = max(lifts, key=lambda one: one[0])
        if lift >= _REMARKABLE:
            within = _lift(pair, "expected_overlap_by_tensor")
            sentences.append(
                f"{_join(pair['agents'])} changed the same parameters {lift:.1f} times as often as chance would at "
                f"these densities, and {within:.1f} times as often as chance would within each tensor."
            )
    return sentences


def _opposed(data: dict[str, Any]) -> list[str]:
    """Which agents undo each other's changes where both made some."""
    return [
        f"{_join(pair['agents'])} pull against each other (cosine {pair['cosine']:.2f}, "
        f"{_percent(pair['sign_agreement'])} of what they share moved the same way): the mean of their "
        "shared changes cancels; try the merge without one of them."
        for pair in data["pairs"]
        if pair["cosine"] is not None and pair["cosine"] <= -_RELATED and pair["overlap"]
    ]


def _swallowed(data: dict[str, Any]) -> list[str]:
    """Whether rounding takes back what RAM+ adds."""
    lost = [
        agent
        for agent in data["agents"]
        if agent["effective_lambda"] is not None
        and agent["lambda"] - 1 >= _WORTH_KEEPING
        and agent["effective_lambda"] - 1 < _SWALLOWED * (agent["lambda"] - 1)
    ]
    if not lost:
        return []
    factors = ", ".join(f"{a['label']} {a['lambda']:.3f} to {a['effective_lambda']:.3f}" for a in lost)
    return [
        f"Rounding to the base's dtype takes back more than half of what RAM+ adds (lambda as meant and as written: "
        f"{factors}): merge with --rounding stochastic or --output_dtype float32."
    ]


def _suggest_epsilon(data: dict[str, Any]) -> dict[str, Any]:
    """The smallest epsilon of the grid at which no agent is mostly shared, if no agent loses much by it."""
    default = data["epsilon"]
    costly = {agent["label"]: agent["by_epsilon"][0]["lost_magnitude"] or 0.0 for agent in data["agents"]}
    worst = max(costly, key=costly.__getitem__)
    if costly[worst] > _MOST_LOST:
        return {
            "epsilon": None,
            "lost_magnitude": costly[worst],
            "reason": f"Epsilon {default:g} ignores {_percent(costly[worst])} of the magnitude of {worst}'s update: "
            "analyze again with a lower one.",
        }
    crowded = [agent for agent in data["agents"] if agent["changed"] and 1 - agent["unique_share"] > _MOSTLY_SHARED]
    if not crowded:
        return {
            "epsilon": default,
            "lost_magnitude": None,
            "reason": f"Epsilon {default:g} is fine: every agent has changes of its own (more than "
            f"{_percent(1 - _MOSTLY_SHARED)} of what it changed).",
        }
    problem = (
        f"At epsilon {default:g} more than {_percent(_MOSTLY_SHARED)} of the changes of "
        f"{_join([agent['label'] for agent in crowded])} are shared, so RAM would be nearly a plain average."
    )
    for level, step in enumerate(data["agents"][0]["by_epsilon"]):
        rows = [agent["by_epsilon"][level] for agent in data["agents"] if agent["changed"]]
        if all(row["density"] and 1 - row["unique_share"] <= _MOSTLY_SHARED for row in rows):
            worst = max(data["agents"], key=lambda agent: agent["by_epsilon"][level]["lost_magnitude"] or 0.0)
            lost = worst["by_epsilon"][level]["lost_magnitude"]
            cost = f"{_percent(lost)} of the magnitude of {worst['label']}'s update, less of the others'"
            if len(rows) == 1:
                cost = f"{_percent(lost)} of the magnitude of its update"
            if lost <= _MOST_LOST:
                return {
                    "epsilon": step["epsilon"],
                    "lost_magnitude": lost,
                    "reason": f"{problem} Try --epsilon {step['epsilon']:g}, the smallest step at which every agent "
                    f"keeps more than {_percent(1 - _MOSTLY_SHARED)} to itself; it ignores {cost}.",
                }
            return {
                "epsilon": default,
                "lost_magnitude": None,
                "reason": f"{problem} No epsilon helps: the smallest step that would, {step['epsilon']:g}, ignores "
                f"{cost}. Leave out the densest agent, or compare other methods.",
            }
    return {
        "epsilon": default,
        "lost_magnitude": None,
        "reason": f"{problem} No epsilon helps: at each some agent keeps nothing to itself. Leave out the densest "
        "agent, or compare other methods.",
    }


def _epsilon_to_compare(data: dict[str, Any]) -> dict[str, Any] | None:
    """The step beyond the merge's own epsilon at which the updates lose about as much as was best in the study."""
    agents = [agent for agent in data["agents"] if agent["changed"]]
    if len(agents) < 2:
        return None
    steps = []
    for rows in list(zip(*(agent["by_epsilon"] for agent in agents), strict=True))[1:]:
        lost = float(np.mean([row["lost_magnitude"] for row in rows]))
        is_helpful = all(row["density"] and 1 - row["unique_share"] <= _MOSTLY_SHARED for row in rows)
        if is_helpful and _LEAST_LOST <= lost <= _MOST_LOST:
            steps.append({"epsilon": rows[0]["epsilon"], "lost_magnitude": lost})
    return min(steps, key=lambda step: abs(step["lost_magnitude"] - _BEST_LOST), default=None)


def _compared(step: dict[str, Any] | None) -> list[str]:
    if step is None:
        return []
    return [
        f"Compare it with --epsilon {step['epsilon']:g}, which ignores {_percent(step['lost_magnitude'])} of the "
        f"updates' magnitude (recipes/sweep.py): where about {_percent(_BEST_LOST)} were ignored, RAM+ kept most of "
        "what small models had learned (docs/RESULTS.md)."
    ]


def _cosines(data: dict[str, Any]) -> np.ndarray:
    """Matrix of the pairs' cosines; 0 for an agent that changed nothing."""
    at = {agent["label"]: position for position, agent in enumerate(data["agents"])}
    cosines = np.eye(len(at))
    for pair in data["pairs"]:
        first, second = (at[label] for label in pair["agents"])
        cosines[first, second] = cosines[second, first] = pair["cosine"] or 0.0
    return cosines


def _cluster(similarity: np.ndarray) -> tuple[list[int], list[list[int]]]:
    """Average linkage: an order with similar agents side by side, and the groups above the threshold."""
    clusters = [[position] for position in range(len(similarity))]
    groups = None
    while len(clusters) > 1:
        closeness = {
            (i, j): similarity[np.ix_(clusters[i], clusters[j])].mean()
            for i, j in itertools.combinations(range(len(clusters)), 2)
        }
        i, j = max(closeness, key=closeness.__getitem__)
        if groups is None and closeness[i, j] < _RELATED:
            groups = [list(cluster) for cluster in clusters]
        clusters[i] += clusters.pop(j)
    return clusters[0], groups or [list(cluster) for cluster in clusters]


def _lift(pair: dict[str, Any], expected: str = "expected_overlap") -> float | None:
    """How many times as large the overlap is as chance would make it."""
    return pair["overlap"] / pair[expected] if pair[expected] else None


def _join(labels: list[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"


def _percent(share: float | None) -> str:
    """`"44 %"`, `"3.2 %"`, `"0.04 %"`: two digits, and none is called 0 or 100 that is not."""
    if share is None:
        return "-"
    percent = 100 * share
    if percent >= 99.5 and percent < 100:
        return f"{min(percent, 99.99):.2f} %"
    return f"{percent:.0f} %" if percent >= 9.95 or percent == 0 else f"{percent:.2g} %"
