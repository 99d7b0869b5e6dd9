"""What every command shares: its `--registry`, tables, sizes, an agent in words or as data."""

import argparse
import json
from collections.abc import Callable
from typing import Any

from ..table import align


__all__ = ["ONE_AGENT", "add_command", "add_json", "add_model_output", "describe", "print_table", "show_agent", "size"]

ONE_AGENT = "Agent: NAME (its latest version) or NAME@v2."


def add_command(
    commands: Any, name: str, command: Callable[[argparse.Namespace], None], text: str, *, agent: str | None = None
) -> argparse.ArgumentParser:
    """Add a command to the parser's.

    Args:
        commands:
            What `ArgumentParser.add_subparsers` gave.
        name (`str`):
            Name of the command.
        command (`Callable`):
            What runs it.
        text (`str`):
            What it does, for `--help`.
        agent (`str`, *optional*):
            What `--agent` means, for a command that needs one.
    """
    sub = commands.add_parser(name, help=text, description=text)
    sub.set_defaults(command=command)
    sub.add_argument("--registry", required=True, help="Directory of the registry.")
    if agent:
        sub.add_argument("--agent", required=True, help=agent)
    return sub


def add_json(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--json", action="store_true", help="Print data instead of text.")


def add_model_output(sub: argparse.ArgumentParser) -> None:
    """Add the options of a command that writes a model."""
    sub.add_argument("--output_dir", required=True, help="Directory to create; must not exist or be empty.")
    sub.add_argument("--base_model", help="Where the base model is now, if not where it was.")
    sub.add_argument("--max_shard_size", default="5GB", help="Largest size of a weight file (default 5GB).")


def print_table(rows: list[tuple[str, ...]]) -> None:
    print("\n".join(align(rows, len(rows[0]))))


def size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:,.0f} kB"


def describe(agent: Any) -> dict[str, Any]:
    manifest = agent.manifest
    changed = manifest.snapshot.changed
    return {
        "name": agent.name,
        "version": agent.version,
        "density": None if changed is None else changed / max(1, manifest.base_model.total_parameters),
        "bytes": sum(file.size for file in manifest.files.values()),
        "path": str(agent.path),
        **manifest.to_dict(),
    }


def show_agent(agent: Any, as_json: bool) -> None:
    summary = describe(agent)
    if as_json:
        print(json.dumps(summary, indent=2))
        return
    snapshot, base = summary["snapshot"], summary["base_model"]
    lines = [
        ("agent", str(agent)),
        ("kind", summary["kind"]),
        ("created", summary["created"]),
        ("base model", base["name"] + (f" at {base['revision']}" if base["revision"] else "")),
        ("parameters", f"{base['total_parameters']:,}"),
        ("stored as", f"{snapshot['dtype']}, {size(summary['bytes'])} in {summary['path']}"),
    ]
    if summary["density"] is not None:
        lines.append(("changed", f"{snapshot['changed']:,} ({summary['density']:.2%})"))
    if snapshot["epsilon"]:
        lines.append(("not stored", f"changes of at most {snapshot['epsilon']:g}"))
    if snapshot["hidden_update"] is not None:
        lines.append(("rounding hid", f"{snapshot['hidden_update']:.1%} of the update's magnitude"))
    training = summary["training"]
    if "step" in training:
        lines.append(("trained", f"{training['step']:,} of {training['max_steps']:,} steps, {training['arguments']}"))
    rewards = {name: value for name, value in training.get("metrics", {}).items() if name.startswith("reward")}
    lines += [(name, f"{value:.4g}") for name, value in rewards.items()]
    width = max(len(name) for name, _ in lines) + 2
    for name, value in lines:
        print(f"{name:<{width}}{value}")
