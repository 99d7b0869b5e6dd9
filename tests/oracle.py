"""RAM as the paper writes it: element by element, float64, no cleverness. The tests compare ram_trl with this.

Nothing here imports ram_trl. An agent is a dict of task-vector tensors; a tensor that it lacks is a delta of zero.
"""

import math
from dataclasses import dataclass

import numpy as np


@dataclass
class Merge:
    """What the paper's algorithm 1 gives, agents in the order of the input."""

    counts: dict[str, np.ndarray]  # overlap count c of every element
    changed: list[int]
    unique: list[int]
    shared: list[int]
    histogram: list[int]
    rho: list[float]
    factors: list[float]  # lambda
    merged: dict[str, np.ndarray]  # merged task vector


def oracle_merge(
    shapes: dict[str, tuple[int, ...]],
    agents: list[dict[str, np.ndarray]],
    *,
    method: str,
    r: float,
    alpha: float,
    epsilon: float,
    weights: list[float] | None = None,
) -> Merge:
    """Equations 1, 2, 6 and 7, or equation 8 (appendix E) for the soft variant."""
    weights = [1.0] * len(agents) if weights is None else weights
    # epsilon is a float32 like the deltas that it is compared with
    epsilon = float(np.float32(epsilon))
    counts = {name: np.zeros(shape, np.int64) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        for i in np.ndindex(shape):
            for agent in agents:
                counts[name][i] += is_active(agent, name, i, epsilon)

    changed, unique, shared = [0] * len(agents), [0] * len(agents), [0] * len(agents)
    histogram = [0] * (len(agents) + 1)
    for name, shape in shapes.items():
        for i in np.ndindex(shape):
            c = int(counts[name][i])
            histogram[c] += 1
            for t, agent in enumerate(agents):
                if is_active(agent, name, i, epsilon):
                    changed[t] += 1
                    if c == 1:
                        unique[t] += 1
                    else:
                        shared[t] += 1

    rho = [oracle_rho(shared[t], unique[t]) for t in range(len(agents))]
    factors = [oracle_lambda(method, rho[t], r, alpha) for t in range(len(agents))]

    merged = {name: np.zeros(shape, np.float64) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        for i in np.ndindex(shape):
            active = [t for t, agent in enumerate(agents) if is_active(agent, name, i, epsilon)]
            if len(active) == 1:
                t = active[0]
                merged[name][i] = weights[t] * factors[t] * float(agents[t][name][i])
            elif len(active) >= 2:
                total = sum(weights[t] * float(agents[t][name][i]) for t in active)
                merged[name][i] = total / sum(weights[t] for t in active)
    return Merge(counts, changed, unique, shared, histogram, rho, factors, merged)


def is_active(agent: dict[str, np.ndarray], name: str, i: tuple[int, ...], epsilon: float) -> bool:
    """Equation 1, strictly greater."""
    return name in agent and abs(float(agent[name][i])) > epsilon


def oracle_rho(shared: int, unique: int) -> float:
    """Equation 2."""
    if unique > 0:
        return shared / unique
    return math.inf if shared > 0 else 0.0


def oracle_lambda(method: str, rho: float, r: float, alpha: float) -> float:
    """Equation 6 (RAM+), equation 8 (RAM+s, with its limit 1 + r where no element is unique), or 1 (RAM)."""
    if method == "ram":
        return 1.0
    if method == "ram_plus":
        clipped = 0.0 if rho < 0.0 else alpha if rho > alpha else rho
        return 1.0 + r * clipped
    if method == "ram_plus_soft":
        return 1.0 + r if rho == math.inf else 1.0 + r * (rho / (1.0 + rho))
    raise ValueError(method)


def oracle_average(
    shapes: dict[str, tuple[int, ...]], agents: list[dict[str, np.ndarray]], weights: list[float]
) -> dict[str, np.ndarray]:
    """The weighted mean of the task vectors over all agents, zeros included."""
    merged = {name: np.zeros(shape, np.float64) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        for i in np.ndindex(shape):
            total = sum(weights[t] * float(agent[name][i]) for t, agent in enumerate(agents) if name in agent)
            merged[name][i] = total / sum(weights)
    return merged
