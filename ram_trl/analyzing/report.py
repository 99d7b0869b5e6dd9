"""An analysis as files of a directory, and as text for a terminal."""

import importlib.util
from pathlib import Path
from typing import Any

from ..storage.durable import write_json
from ..table import align
from .page import analysis_page


__all__ = ["format_analysis", "write_analysis"]

_COLUMNS = (
    "agent",
    "kind",
    "density",
    "alone",
    "with all",
    "rho",
    "lambda",
    "effective",
    "RAM+ keeps",
    "average keeps",
)


def write_analysis(data: dict[str, Any], folder: Path) -> list[str]:
    """Write `analysis.json`, the pictures and `index.html` into a directory.

    Args:
        data (`dict[str, Any]`):
            Content of `analysis.json`.
        folder (`Path`):
            The directory.

    Returns:
        `list[str]`: what was left out, and why.
    """
    write_json(folder / "analysis.json", data)
    inline, notes = {}, []
    if importlib.util.find_spec("matplotlib") is None:
        notes = ["the pictures were left out, because matplotlib is not installed: pip install ram_trl[analysis]"]
    else:
        # heavy, and not everybody has it
        from .pictures import PICTURES, draw

        for name in PICTURES:
            if name == "pairs" and not data["pairs"]:
                continue
            pictures = draw(data, name)
            for kind, picture in pictures.items():
                (folder / f"{name}.{kind}").write_bytes(picture)
            inline[name] = pictures["svg"].decode()
    (folder / "index.html").write_text(analysis_page(data, inline, notes), encoding="utf-8")
    return notes


def format_analysis(data: dict[str, Any]) -> str:
    """The analysis as text: a table, the findings, and a sentence for each agent."""
    rows = [_COLUMNS, *(_cells(agent) for agent in data["agents"])]
    title = (
        f"{len(data['agents'])} agents of {data['base_model']['name']}, {data['total_parameters']:,} parameters, "
        f"epsilon={data['epsilon']:g}, RAM+ with r={data['r']:g}, alpha={data['alpha']:g}"
    )
    findings = data["findings"]
    return "\n".join([title, *align(rows, 2), "", *findings["summary"], "", *findings["agents"]])


def _cells(agent: dict[str, Any]) -> tuple[str, ...]:
    changed, effective, retained = agent["changed"], agent["effective_lambda"], agent["retained"]
    with_all = agent["shared_with"][-1] / changed if changed and len(agent["shared_with"]) > 1 else None
    return (
        f"{agent['name']}@v{agent['version']}",
        agent["kind"],
        f"{agent['density']:.2%}",
        _share(agent["unique_share"]),
        _share(with_all),
        agent["rho"] if isinstance(agent["rho"], str) else f"{agent['rho']:.3f}",
        f"{agent['lambda']:.4f}",
        "-" if effective is None else f"{effective:.4f}",
        _share(retained["ram_plus"]),
        _share(retained["average"]),
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
