"""What every command shares: its `--registry`, tables, sizes, an agent in words or as data."""

import argparse
import json
from collections.abc import Callable
from typing import Any

from ..table import align


__all__ = ["ONE_AGENT", "add_command", "add_json", "add_model_output", "describe", "print_table", "show_agent", "size"]

REGISTRY = "Directory of the registry; for a command that only reads also hf://USER/REPO or another URL."
ONE_AGENT = "Agent: NAME (its latest version), NAME@v2 or NAME@ALIAS."


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
    sub.add_argument("--registry", required=True, help=REGISTRY)
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
    return {
        "name": agent.name,
        "version": agent.version,
        "density": manifest.density,
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
    print_table(lines + _provenance(summary["training"]))


def _provenance(training: dict[str, Any]) -> list[tuple[str, str]]:
    """What is most asked for of where an agent comes from; `--json` has all. None of it need be there, or be right."""
    lines = []
    steps, trainer = [training.get(key) for key in ("step", "max_steps")], training.get("arguments")
    if all(isinstance(number, int) for number in steps):
        lines.append(("trained", f"{steps[0]:,} of {steps[1]:,} steps{f', {trainer}' if trainer else ''}"))
    if isinstance(rewards := training.get("reward_functions"), list):
        lines.append(("rewarded by", ", ".join(map(str, rewards))))
    for name, value in _table(training, "metrics").items():
        if name.startswith("reward") and isinstance(value, int | float):
            lines.append((name, f"{value:.4g}"))
    data, git = _table(training, "dataset"), _table(training, "git")
    if data:
        rows = f"{data['rows']:,} rows" if isinstance(data.get("rows"), int) else "a stream"
        lines.append(("trained on", f"{rows}, {data['fingerprint']}" if data.get("fingerprint") else rows))
    if git:
        lines.append(("git commit", f"{git.get('commit')}{' and changes' if git.get('dirty') else ''}"))
    if versions := _table(training, "versions"):
        lines.append(("trained with", ", ".join(f"{name} {version}" for name, version in versions.items())))
    return lines


def _table(training: dict[str, Any], key: str) -> dict[str, Any]:
    value = training.get(key)
    return value if isinstance(value, dict) else {}
