"""Commands that look at agents beside each other: analyze, isolate."""

import argparse
import json
from typing import Any

from ..arithmetic.defaults import DEFAULT_EPSILON
from ..errors import ConfigError
from ..terminal import progress_bar
from .common import ONE_AGENT, add_command, add_json, add_model_output


__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add them to the parser's commands."""
    text = "Compare agents before they are merged: overlaps, agreement, epsilon."
    analyze = add_command(commands, "analyze", _analyze, text)
    analyze.add_argument("--agents", nargs="*", help="Agents to compare. Default: the latest version of every agent.")
    analyze.add_argument("--output_dir", help="Directory to create for data, pictures and a page. Default: none.")
    analyze.add_argument("--base_model", help="Where the base model is now, if not where it was.")
    for name, default, text in (("r", 0.1, "Rescale strength"), ("alpha", 2.0, "Bound on rho")):
        analyze.add_argument(f"--{name}", type=float, default=default, help=f"{text} of RAM+ (default {default:g}).")
    add_json(analyze)
    text = "Write the base with what one agent alone changed, as a model."
    isolate = add_command(commands, "isolate", _isolate, text, agent=ONE_AGENT)
    isolate.add_argument(
        "--others", nargs="*", help="Agents that say what is unique. Default: the latest of every other of its base."
    )
    isolate.add_argument("--scaling", type=float, default=1.0, help="Factor; 1/N dilutes it as an average does.")
    add_model_output(isolate)
    for sub in (isolate, analyze):
        counts = f"Larger changes count (default {DEFAULT_EPSILON:g})."
        sub.add_argument("--epsilon", type=float, default=DEFAULT_EPSILON, help=counts)


def _analyze(arguments: argparse.Namespace) -> None:
    from ..analyzing.analyze import analyze_agents
    from ..analyzing.report import format_analysis
    from ..sharing.reading import open_registry

    names = ("output_dir", "agents", "r", "alpha", "epsilon", "base_model")
    with progress_bar() as progress:
        options = {name: getattr(arguments, name) for name in names}
        registry = open_registry(arguments.registry, arguments.agents, progress=progress)
        data = analyze_agents(registry, **options, progress=progress)
    print(json.dumps(data, indent=2) if arguments.json else format_analysis(data))
    if arguments.output_dir and not arguments.json:
        print(f"\nto read on: {arguments.output_dir}/index.html")


def _isolate(arguments: argparse.Namespace) -> None:
    from ..merging.merge import merge_agents
    from ..sharing.reading import open_registry

    with progress_bar() as progress:
        names = open_registry(arguments.registry, weights=False).names()
        others = names if arguments.others is None else arguments.others
        registry = open_registry(arguments.registry, [arguments.agent, *others], progress=progress)
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
