"""The command line `ram-trl`: register, list, show, restore and remove agents."""

import argparse
import json
from typing import Any

from .arithmetic.defaults import DEFAULT_EPSILON
from .config import OptionParser
from .terminal import exit_on_error, progress_bar


__all__ = ["main"]


def main(argv: list[str] | None = None) -> None:
    """Entry point of `ram-trl` and `python -m ram_trl`."""
    with exit_on_error(OSError, UnicodeError):
        arguments = _parser().parse_args(argv)
        arguments.command(arguments)


def _register(arguments: argparse.Namespace) -> None:
    from .registering.register import register_agent
    from .storage.registry import AgentRegistry

    with progress_bar() as progress:
        agent = register_agent(
            AgentRegistry(arguments.registry),
            arguments.agent,
            arguments.model,
            base_model=arguments.base_model,
            revision=arguments.revision,
            snapshot_dtype=arguments.snapshot_dtype,
            epsilon=arguments.epsilon,
            progress=progress,
        )
    _show_agent(agent, arguments.json)


def _list(arguments: argparse.Namespace) -> None:
    from .storage.registry import AgentRegistry

    agents = list(AgentRegistry(arguments.registry))
    if arguments.json:
        print(json.dumps([_summary(agent) for agent in agents], indent=2))
        return
    rows = [("agent", "kind", "changed", "size", "created", "base model")]
    for agent in agents:
        summary = _summary(agent)
        density = "-" if summary["density"] is None else f"{summary['density']:.2%}"
        rows.append(
            (
                str(agent),
                summary["kind"],
                density,
                _size(summary["bytes"]),
                summary["created"],
                summary["base_model"]["name"],
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _show(arguments: argparse.Namespace) -> None:
    from .storage.registry import AgentRegistry

    _show_agent(AgentRegistry(arguments.registry).get(arguments.agent), arguments.json)


def _restore(arguments: argparse.Namespace) -> None:
    from .registering.restore import restore_agent
    from .storage.registry import AgentRegistry

    with progress_bar() as progress:
        agent = restore_agent(
            AgentRegistry(arguments.registry),
            arguments.agent,
            arguments.output_dir,
            base_model=arguments.base_model,
            max_shard_size=arguments.max_shard_size,
            progress=progress,
        )
    print(f"{agent} restored to {arguments.output_dir}")


def _remove(arguments: argparse.Namespace) -> None:
    from .storage.registry import AgentRegistry

    for agent in AgentRegistry(arguments.registry).remove(arguments.agent):
        print(f"{agent} removed")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:,.0f} kB"


def _summary(agent: Any) -> dict[str, Any]:
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


def _show_agent(agent: Any, as_json: bool) -> None:
    summary = _summary(agent)
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
        ("stored as", f"{snapshot['dtype']}, {_size(summary['bytes'])} in {summary['path']}"),
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


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(prog="ram-trl", description="Agents of reinforcement learning, registered.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Any, text: str, *, agent: str | None = None) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        sub.add_argument("--registry", required=True, help="Directory of the registry.")
        if agent:
            sub.add_argument("--agent", required=True, help=agent)
        return sub

    one = "Agent: NAME (its latest version) or NAME@v2."
    register = add("register", _register, "Register an agent that is on disk or on the Hub.", agent="Name to give it.")
    register.add_argument("--model", required=True, help="Checkpoint directory, PEFT adapter directory or Hub id.")
    register.add_argument("--base_model", help="Directory or Hub id of the base model. An adapter names its own.")
    register.add_argument("--revision", help="Revision of the base model on the Hub.")
    register.add_argument(
        "--snapshot_dtype", default="auto", help="auto (the agent's own), bfloat16, float16, float32."
    )
    register.add_argument(
        "--epsilon",
        type=float,
        default=DEFAULT_EPSILON,
        help=f"Smallest change that is stored of float32 weights (default {DEFAULT_EPSILON:g}).",
    )
    listing = add("list", _list, "List the agents of a registry.")
    show = add("show", _show, "Show one agent.", agent=one)
    for sub in (register, listing, show):
        sub.add_argument("--json", action="store_true", help="Print data instead of text.")
    restore = add("restore", _restore, "Write an agent as a normal model directory.", agent=one)
    restore.add_argument("--output_dir", required=True, help="Directory to create; must not exist or be empty.")
    restore.add_argument("--base_model", help="Where the base model is now, if not where it was.")
    restore.add_argument("--max_shard_size", default="5GB", help="Largest size of a weight file (default 5GB).")
    add("remove", _remove, "Remove a version (NAME@v2) or all versions (NAME).", agent="Agent: NAME or NAME@v2.")
    return parser
