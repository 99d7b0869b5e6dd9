"""RAM and the other methods as their papers write them: float64, no cleverness. The tests compare ram_trl with this.

Nothing here imports ram_trl. An agent is a dict of task-vector tensors; a tensor that it lacks is a delta of zero.
"""

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch


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


# The other methods, from their papers, over whole tensors. A merged task vector is a dict of float64 arrays.


def oracle_method(
    method: str,
    shapes: dict[str, tuple[int, ...]],
    agents: list[dict[str, np.ndarray]],
    weights: list[float],
    **options,
) -> dict[str, np.ndarray]:
    """What a method makes of the task vectors; `options` are the method's own and what its oracle needs beside."""
    filled = [{name: whole(agent, name, shape) for name, shape in shapes.items()} for agent in agents]
    return ORACLES[method](filled, weights, **options)


def whole(agent: dict[str, np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(agent[name], np.float64) if name in agent else np.zeros(shape)


def mean_of(agents, weights, name):
    return sum(w * agent[name] for w, agent in zip(weights, agents, strict=True)) / sum(weights)


def oracle_mean(agents, weights, t=1.0):
    """Average, and interpolation: t times the weighted mean."""
    return {name: t * mean_of(agents, weights, name) for name in agents[0]}


def oracle_task_arithmetic(agents, weights, scaling):
    """2212.04089: the sum, scaled."""
    return {
        name: scaling * sum(w * agent[name] for w, agent in zip(weights, agents, strict=True)) for name in agents[0]
    }


def oracle_ties(agents, weights, density, scaling, per_tensor=0.0):
    """2306.01708, algorithm 1, with magnitudes sorted whole."""
    trimmed = []
    for agent in agents:
        groups = [[name] for name in agent] if per_tensor else [list(agent)]
        kept = {}
        for names in groups:
            sizes = np.sort(np.concatenate([np.abs(agent[name]).ravel() for name in names]))[::-1]
            threshold = sizes[max(1, int(density * len(sizes))) - 1]
            kept |= {name: np.where(np.abs(agent[name]) >= threshold, agent[name], 0.0) for name in names}
        trimmed.append(kept)
    merged = {}
    for name in agents[0]:
        stack = np.stack([agent[name] for agent in trimmed])
        w = np.asarray(weights).reshape(-1, *[1] * (stack.ndim - 1))
        elected = np.sign((w * stack).sum(axis=0))
        agrees = (np.sign(stack) == elected) & (elected != 0)
        total, mass = (w * stack * agrees).sum(axis=0), (w * agrees).sum(axis=0)
        merged[name] = scaling * np.divide(total, mass, out=np.zeros_like(total), where=mass > 0)
    return merged


def oracle_drop(agents, labels, seed, drop_rate):
    """2311.03099: what is left of every agent, by the stream of random numbers that docs/METHODS.md defines."""
    dropped = []
    for agent, label in zip(agents, labels, strict=True):
        left = {}
        for name, delta in agent.items():
            keep = np.array([oracle_uniform(f"{seed}/dare/{label}/{name}", i) >= drop_rate for i in range(delta.size)])
            left[name] = delta * keep.reshape(delta.shape) / (1 - drop_rate)
        dropped.append(left)
    return dropped


def oracle_uniform(stream: str, index: int) -> float:
    """SplitMix64 at a counter of a named stream, its upper 24 bits."""
    mask = 2**64 - 1
    first = int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=8).digest(), "little")
    z = (first + index * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return ((z ^ (z >> 31)) >> 40) / 2**24


def oracle_dare(agents, weights, labels, seed, drop_rate, scaling):
    return oracle_task_arithmetic(oracle_drop(agents, labels, seed, drop_rate), weights, scaling)


def oracle_dare_ties(agents, weights, labels, seed, drop_rate, density, scaling, per_tensor=0.0):
    return oracle_ties(oracle_drop(agents, labels, seed, drop_rate), weights, density, scaling, per_tensor)


def oracle_isolate(agents, weights, epsilon, scaling):
    """2601.13572, figure 3: the unique part of the first agent."""
    epsilon, merged = float(np.float32(epsilon)), {}
    for name in agents[0]:
        active = np.stack([np.abs(agent[name]) > epsilon for agent in agents])
        merged[name] = scaling * agents[0][name] * (active[0] & (active.sum(axis=0) == 1))
    return merged


def is_matrix(name: str, values: np.ndarray) -> bool:
    """Weights of linear layers in the models of tests/models.py."""
    return values.ndim == 2 and not any(part in name for part in ("embed_tokens", "lm_head", "wte", "wpe"))


def oracle_wudi(agents, weights, steps, learning_rate):
    """2503.08099: the loss as the paper has it, by torch's Adam."""
    merged = oracle_mean(agents, weights)
    for name in agents[0]:
        deltas = [(w, torch.from_numpy(a[name])) for w, a in zip(weights, agents, strict=True) if a[name].any()]
        if not deltas or not is_matrix(name, agents[0][name]):
            continue
        found = sum(delta for _, delta in deltas).clone().requires_grad_()
        optimizer = torch.optim.Adam([found], lr=learning_rate)
        for _ in range(int(steps)):
            loss = sum(w * ((found - d) @ d.T).square().sum() / d.square().sum() for w, d in deltas)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        merged[name] = found.detach().numpy()
    return merged


def oracle_resmerge(agents, weights, beta_min, beta_max, head):
    """2606.02252: every mean over agents or pairs weighted."""
    merged = oracle_mean(agents, weights)
    for name in agents[0]:
        if is_matrix(name, agents[0][name]) and any(agent[name].any() for agent in agents):
            merged[name] = resmerge_matrix([agent[name] for agent in agents], weights, beta_min, beta_max, head)
    return merged


def resmerge_matrix(deltas, weights, beta_min, beta_max, head):
    heads, residuals = [], []
    for delta in deltas:
        u, s, vh = np.linalg.svd(delta, full_matrices=False)
        heads.append(s[0] * np.outer(u[:, 0], vh[0]))
        residuals.append(delta - heads[-1])

    def mean(values):
        return sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)

    def cosine(x, y):
        scale = np.linalg.norm(x) * np.linalg.norm(y)
        return float((x * y).sum() / scale) if scale else 0.0

    def over_pairs(values, function):
        pairs = [(i, j) for i in range(len(values)) for j in range(i) if values[i].any() and values[j].any()]
        everyone = [(i, j) for i in range(len(values)) for j in range(i)]
        total = sum(weights[i] * weights[j] * function(cosine(values[i], values[j])) for i, j in pairs)
        return total, sum(weights[i] * weights[j] for i, j in pairs), sum(weights[i] * weights[j] for i, j in everyone)

    lengths = [np.linalg.norm(residual) for residual in residuals]
    directions = [r / n if n > 1e-9 else np.zeros_like(r) for r, n in zip(residuals, lengths, strict=True)]
    consensus = mean(directions)
    c = mean([cosine(q, consensus) for q in directions])
    if c <= math.sqrt(sum(w * w for w in weights)) / sum(weights) + 1e-6:
        backbone = mean(residuals)
    else:
        total, _, everyone = over_pairs(directions, lambda x: x)
        beta = beta_max - (beta_max - beta_min) * ((total / everyone + 1) / 2 + (c + 1) / 2) / 2
        backbone = c**beta * mean(lengths) * consensus / np.linalg.norm(consensus)
    total, some, _ = over_pairs(heads, lambda x: max(0.0, x))
    agreement = total / some if some else 1.0
    mean_head = mean(heads)
    return backbone + head * agreement * np.linalg.norm(backbone) * mean_head / np.linalg.norm(mean_head)


ORACLES = {
    "average": oracle_mean,
    "interpolation": oracle_mean,
    "task_arithmetic": oracle_task_arithmetic,
    "ties": oracle_ties,
    "dare": oracle_dare,
    "dare_ties": oracle_dare_ties,
    "isolate": oracle_isolate,
    "wudi": oracle_wudi,
    "resmerge": oracle_resmerge,
}
