"""The report of a merge: what was counted, what was applied, as data and as a table."""

import math
from collections.abc import Sequence
from typing import Any

from ..arithmetic.methods import METHODS
from ..arithmetic.ram import OverlapCounts, overlap_ratio
from ..storage.registry import RegisteredAgent
from ..table import align
from ..version import __version__
from .plan import MergePlan


__all__ = ["COLUMNS", "build_report", "format_report", "format_row"]

COLUMNS = ("agent", "kind", "changed", "density", "shared", "unique", "rho", "lambda", "effective", "weight")

# With more than this share of an agent's changes shared, hardly anything is left for RAM to preserve.
_MOSTLY_SHARED = 0.95


def build_report(
    plan: MergePlan,
    counts: OverlapCounts,
    factors: Sequence[float],
    magnitudes: dict[str, list[tuple[float, float]]] | None = None,
) -> dict[str, Any]:
    """Content of `merge_report.json`.

    Args:
        plan ([`MergePlan`]):
            The merge.
        counts ([`~ram_trl.arithmetic.ram.OverlapCounts`]):
            Overlap statistics of the whole model.
        factors (`Sequence[float]`):
            Rescale factor lambda of every agent, for RAM's methods.
        magnitudes (`dict`, *optional*):
            Magnitudes of unique changes from [`merge_tensors`], of all ranks; without them the effective lambdas are
            left out.
    """
    settings, base = plan.settings, plan.agents[0].manifest.base_model
    is_rescaling = METHODS[settings.method].rescale is not None
    rows = []
    for position, agent in enumerate(plan.agents):
        changed, unique, shared = counts.changed[position], counts.unique[position], counts.shared[position]
        rho = overlap_ratio(shared, unique)
        row = {
            "name": agent.name,
            "version": agent.version,
            "kind": agent.manifest.kind,
            "changed": changed,
            "shared": shared,
            "unique": unique,
            "density": changed / counts.total if counts.total else 0.0,
            "rho": "inf" if math.isinf(rho) else rho,
            "lambda": factors[position] if is_rescaling else None,
            "weight": plan.weights[position],
            # of an agent that was rounded to the base's dtype: the share of its update that this took away
            "hidden_update": agent.manifest.snapshot.hidden_update,
        }
        if magnitudes is not None:
            # an agent's weight is no part of lambda; of another method, what is left is left by its weight too
            row["effective_lambda"] = _ratio(
                [tensor[position] for tensor in magnitudes.values()], plan.weights[position] if is_rescaling else 1.0
            )
        rows.append(row)
    report = {
        "ram_trl_version": __version__,
        "method": settings.method,
        "method_options": settings.method_options,
        "r": settings.r,
        "alpha": settings.alpha,
        "epsilon": settings.epsilon,
        "seed": settings.seed,
        "rounding": settings.rounding,
        "output_dtype": settings.output_dtype,
        "base_model": {"name": base.name, "revision": base.revision, "digest": base.digest},
        "total_parameters": counts.total,
        "agents": rows,
        "overlap_histogram": counts.histogram,
    }
    report["warnings"] = _warnings(report, plan.agents)
    return report


def _warnings(report: dict[str, Any], agents: Sequence[RegisteredAgent]) -> list[str]:
    """What a user should know before trusting the merge, with the cure."""
    warnings = []
    for row, agent in zip(report["agents"], agents, strict=True):
        step, max_steps = (agent.manifest.training.get(key, 0) for key in ("step", "max_steps"))
        # written by hand, they may be anything
        if isinstance(step, int) and isinstance(max_steps, int) and step < max_steps:
            warnings.append(
                f"agent {agent} was registered after {step:,} of {max_steps:,} steps of its training; if that was not "
                "meant, name another version with --agents"
            )
        method, dropped = METHODS[report["method"]], agent.manifest.snapshot.epsilon
        if dropped and not method.is_masked:
            warnings.append(
                f"agent {agent} was stored without changes of at most {dropped:g}, which {report['method']} would "
                "merge too: register it again with --epsilon 0, or compare methods with that in mind"
            )
        if row["changed"] == 0 and method.is_masked:
            warnings.append(
                f"agent {row['name']} changed nothing by more than epsilon={report['epsilon']:g}: it adds nothing to "
                "the merge; lower --epsilon, or check that it was trained"
            )
        elif row["changed"] and len(agents) > 1 and method.rescale:
            share = row["shared"] / row["changed"]
            if share > _MOSTLY_SHARED:
                others = sorted((other for other in report["agents"] if other is not row), key=lambda o: -o["density"])
                dense = ", ".join(f"{other['name']} {other['density']:.0%}" for other in others[:3])
                warnings.append(
                    f"{share:.1%} of the changes of agent {row['name']} are shared with others (which changed of the "
                    f"model: {dense}), so they are nearly a plain average: raise --epsilon above "
                    f"{report['epsilon']:g} towards the size of the updates (ram-trl analyze shows it), "
                    "leave the densest agent out, or compare other methods (--method)"
                )
    return warnings


def format_row(row: dict[str, Any]) -> tuple[str, ...]:
    """One agent's row as text, a cell for each of `COLUMNS`."""
    effective = row.get("effective_lambda")
    return (
        f"{row['name']}@v{row['version']}",
        row["kind"],
        f"{row['changed']:,}",
        f"{row['density']:.2%}",
        f"{row['shared']:,}",
        f"{row['unique']:,}",
        row["rho"] if isinstance(row["rho"], str) else f"{row['rho']:.3f}",
        "-" if row["lambda"] is None else f"{row['lambda']:.4f}",
        "-" if effective is None else f"{effective:.4f}",
        f"{row['weight']:g}",
    )


def format_report(report: dict[str, Any]) -> str:
    """The report as a table of plain text."""
    lines = [COLUMNS, *(format_row(row) for row in report["agents"])]
    overlap = ", ".join(f"{count:,} by {agents or 'none'}" for agents, count in enumerate(report["overlap_histogram"]))
    options = {name: report[name] for name in ("r", "alpha")} if METHODS[report["method"]].rescale else {}
    options |= {**report["method_options"], "epsilon": report["epsilon"]}
    title = (
        f"{report['method']}: {', '.join(f'{name}={value:g}' for name, value in options.items())} over "
        f"{report['total_parameters']:,} parameters of {report['base_model']['name']}"
    )
    return "\n".join([title, *align(lines, 2), f"parameters changed: {overlap}"])


def _ratio(pairs: list[tuple[float, float]], weight: float) -> float | None:
    """Magnitude in the written model over magnitude in the agent, times a weight."""
    after, before = math.fsum(pair[0] for pair in pairs), math.fsum(pair[1] for pair in pairs)
    # In their last places the sums depend on the engine.
    return float(f"{after / (weight * before):.6g}") if before else None
