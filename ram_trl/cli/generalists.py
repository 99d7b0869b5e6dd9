"""Commands about the models that were merged of the agents: generalists, promote."""

import argparse
import json
from typing import Any

from .common import add_command, add_json, print_table


__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add them to the parser's commands."""
    add_json(add_command(commands, "generalists", _generalists, "List the models that were merged with --merge_to."))
    text = "Make a version of a generalist its latest, also to go back to an earlier one."
    promote = add_command(commands, "promote", _promote, text)
    promote.add_argument("--generalist", required=True, help="Version: NAME@v2.")


def _generalists(arguments: argparse.Namespace) -> None:
    from ..storage.registry import AgentRegistry

    registry = AgentRegistry(arguments.registry)
    # which says if it is no registry
    registry.names()
    store = registry.generalists
    latest = {name: store.latest(name) for name in store.names()}
    generalists = list(store)
    if arguments.json:
        print(json.dumps([_generalist_summary(one, latest[one.name]) for one in generalists], indent=2))
        return
    rows = [("generalist", "merged of", "method", "created", "verdict")]
    for one in generalists:
        verdict = f"refused: {one.manifest.refused}" if one.manifest.refused else "accepted"
        if one.version == latest[one.name]:
            verdict = f"latest, {verdict}"
        rows.append((str(one), " ".join(one.parents), one.manifest.settings["method"], one.manifest.created, verdict))
    print_table(rows)


def _promote(arguments: argparse.Namespace) -> None:
    from ..storage.registry import AgentRegistry

    generalist = AgentRegistry(arguments.registry).generalists.promote(arguments.generalist)
    print(f"{generalist} is the latest of {generalist.name}, in {generalist.path}")


def _generalist_summary(generalist: Any, latest: int | None) -> dict[str, Any]:
    return {
        "name": generalist.name,
        "version": generalist.version,
        "latest": generalist.version == latest,
        "path": str(generalist.path),
        **generalist.manifest.to_dict(),
    }
