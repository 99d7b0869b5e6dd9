"""The command line `ram-trl`: agents and generalists of a registry."""

import argparse
import json
from typing import Any

from .arithmetic.defaults import DEFAULT_EPSILON
from .errors import ConfigError
from .options import OptionParser
from .table import align
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
    _print_table(rows)


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


def _isolate(arguments: argparse.Namespace) -> None:
    from .merging.merge import merge_agents
    from .storage.registry import AgentRegistry

    registry = AgentRegistry(arguments.registry)
    agent = registry.get(arguments.agent)
    if arguments.others is None:
        others = [other for other in registry if other.name != agent.name and _same_base(agent, other)]
    else:
        others = [registry.get(spec) for spec in arguments.others]
    for other in others:
        if str(other) == str(agent):
            raise ConfigError(f"--others names agent {agent} itself, whose changes are all its own: leave it out")
        if not _same_base(agent, other):
            raise ConfigError(f"agent {other} has another base model than {agent}: leave it out of --others")
    with progress_bar() as progress:
        report = merge_agents(
            registry,
            arguments.output_dir,
            agents=[str(agent), *dict.fromkeys(map(str, others))],
            method="isolate",
            method_options={"scaling": arguments.scaling},
            epsilon=arguments.epsilon,
            base_model=arguments.base_model,
            max_shard_size=arguments.max_shard_size,
            progress=progress,
        )
    unique = report["agents"][0]["unique"]
    print(f"what {agent} alone changed ({unique:,} parameters) over its base, in {arguments.output_dir}")


def _same_base(agent: Any, other: Any) -> bool:
    return agent.manifest.base_model.digest == other.manifest.base_model.digest


def _analyze(arguments: argparse.Namespace) -> None:
    from .analyzing.analyze import analyze_agents
    from .analyzing.report import format_analysis

    names = ("output_dir", "agents", "r", "alpha", "epsilon", "base_model")
    with progress_bar() as progress:
        options = {name: getattr(arguments, name) for name in names}
        data = analyze_agents(arguments.registry, **options, progress=progress)
    print(json.dumps(data, indent=2) if arguments.json else format_analysis(data))
    if arguments.output_dir and not arguments.json:
        print(f"\nto read on: {arguments.output_dir}/index.html")


def _rebase(arguments: argparse.Namespace) -> None:
    from .registering.rebase import rebase_agent
    from .storage.registry import AgentRegistry

    with progress_bar() as progress:
        agent = rebase_agent(
            AgentRegistry(arguments.registry),
            arguments.agent,
            new_base=arguments.new_base,
            revision=arguments.revision,
            base_model=arguments.base_model,
            snapshot_dtype=arguments.snapshot_dtype,
            epsilon=arguments.epsilon,
            progress=progress,
        )
    _show_agent(agent, arguments.json)


def _generalists(arguments: argparse.Namespace) -> None:
    from .storage.registry import AgentRegistry

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
    _print_table(rows)


def _promote(arguments: argparse.Namespace) -> None:
    from .storage.registry import AgentRegistry

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


def _print_table(rows: list[tuple[str, ...]]) -> None:
    print("\n".join(align(rows, len(rows[0]))))


def _remove(arguments: argparse.Namespace) -> None:
    from .storage.registry import AgentRegistry

    registry = AgentRegistry(arguments.registry)
    if (arguments.agent is None) == (arguments.generalist is None):
        raise ConfigError("name what to remove: --agent or --generalist")
    spec = arguments.agent or arguments.generalist
    for version in registry.remove(spec) if arguments.agent else registry.generalists.remove(spec):
        print(f"{version} removed")


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
    rebase = add("rebase", _rebase, "Carry an agent over to another base model, as a new version of it.", agent=one)
    rebase.add_argument("--new_base", help="The new base. By default that of the generalist it was trained from.")
    rebase.add_argument("--base_model", help="Where the agent's present base is now, if not where it was.")
    for sub in (register, rebase):
        sub.add_argument("--revision", help="Revision of the (new) base model on the Hub.")
        sub.add_argument(
            "--snapshot_dtype", default="auto", help="auto (the agent's own), bfloat16, float16, float32."
        )
    smallest = "Smallest change that is stored of float32 weights"
    register.add_argument(
        "--epsilon", type=float, default=DEFAULT_EPSILON, help=f"{smallest} (default {DEFAULT_EPSILON:g})."
    )
    rebase.add_argument("--epsilon", type=float, help=f"{smallest} (default: as the agent was stored).")
    listing = add("list", _list, "List the agents of a registry.")
    show = add("show", _show, "Show one agent.", agent=one)
    generalists = add("generalists", _generalists, "List the models that were merged with --merge_to.")
    analyze = add("analyze", _analyze, "Compare agents before they are merged: overlaps, agreement, epsilon.")
    analyze.add_argument("--agents", nargs="*", help="Agents to compare. Default: the latest version of every agent.")
    analyze.add_argument("--output_dir", help="Directory to create for data, pictures and a page. Default: none.")
    analyze.add_argument("--base_model", help="Where the base model is now, if not where it was.")
    for name, default, text in (("r", 0.1, "Rescale strength"), ("alpha", 2.0, "Bound on rho")):
        analyze.add_argument(f"--{name}", type=float, default=default, help=f"{text} of RAM+ (default {default:g}).")
    for sub in (register, rebase, listing, show, generalists, analyze):
        sub.add_argument("--json", action="store_true", help="Print data instead of text.")
    restore = add("restore", _restore, "Write an agent as a normal model directory.", agent=one)
    isolate = add("isolate", _isolate, "Write the base with what one agent alone changed, as a model.", agent=one)
    isolate.add_argument(
        "--others", nargs="*", help="Agents that say what is unique. Default: the latest of every other of its base."
    )
    isolate.add_argument("--scaling", type=float, default=1.0, help="Factor; 1/N dilutes it as an average does.")
    for sub in (isolate, analyze):
        counts = f"Larger changes count (default {DEFAULT_EPSILON:g})."
        sub.add_argument("--epsilon", type=float, default=DEFAULT_EPSILON, help=counts)
    for sub in (restore, isolate):
        sub.add_argument("--output_dir", required=True, help="Directory to create; must not exist or be empty.")
        sub.add_argument("--base_model", help="Where the base model is now, if not where it was.")
        sub.add_argument("--max_shard_size", default="5GB", help="Largest size of a weight file (default 5GB).")
    promote = add("promote", _promote, "Make a version of a generalist its latest, also to go back to an earlier one.")
    promote.add_argument("--generalist", required=True, help="Version: NAME@v2.")
    remove = add("remove", _remove, "Remove a version (NAME@v2) or all versions (NAME).")
    remove.add_argument("--agent", help="Agent: NAME or NAME@v2.")
    remove.add_argument("--generalist", help="Generalist: NAME or NAME@v2.")
    return parser
