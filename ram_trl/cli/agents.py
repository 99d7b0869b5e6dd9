"""Commands about agents: register, rebase, list, show, restore."""

import argparse
import json
from typing import Any

from ..arithmetic.defaults import DEFAULT_EPSILON
from ..terminal import progress_bar
from .common import ONE_AGENT, add_command, add_json, add_model_output, describe, print_table, show_agent, size


__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add them to the parser's commands."""
    text = "Register an agent that is on disk or on the Hub."
    register = add_command(commands, "register", _register, text, agent="Name to give it.")
    register.add_argument("--model", required=True, help="Checkpoint directory, PEFT adapter directory or Hub id.")
    register.add_argument("--base_model", help="Directory or Hub id of the base model. An adapter names its own.")
    text = "Carry an agent over to another base model, as a new version of it."
    rebase = add_command(commands, "rebase", _rebase, text, agent=ONE_AGENT)
    rebase.add_argument("--new_base", help="The new base. By default that of the generalist it was trained from.")
    rebase.add_argument("--base_model", help="Where the agent's present base is now, if not where it was.")
    for sub in (register, rebase):
        sub.add_argument("--revision", help="Revision of the (new) base model on the Hub.")
        sub.add_argument(
            "--snapshot_dtype", default="auto", help="auto (the agent's own), bfloat16, float16, float32."
        )
    register.add_argument(
        "--provenance", default="full", help="full (default), or minimal: do not record where the model was."
    )
    smallest = "Smallest change that is stored of float32 weights"
    register.add_argument(
        "--epsilon", type=float, default=DEFAULT_EPSILON, help=f"{smallest} (default {DEFAULT_EPSILON:g})."
    )
    rebase.add_argument("--epsilon", type=float, help=f"{smallest} (default: as the agent was stored).")
    listing = add_command(commands, "list", _list, "List the agents of a registry.")
    show = add_command(commands, "show", _show, "Show one agent.", agent=ONE_AGENT)
    for sub in (register, rebase, listing, show):
        add_json(sub)
    restore = add_command(
        commands, "restore", _restore, "Write an agent as a normal model directory.", agent=ONE_AGENT
    )
    add_model_output(restore)


def _register(arguments: argparse.Namespace) -> None:
    from ..registering.register import register_agent
    from ..storage.registry import AgentRegistry

    with progress_bar() as progress:
        agent = register_agent(
            AgentRegistry(arguments.registry),
            arguments.agent,
            arguments.model,
            base_model=arguments.base_model,
            revision=arguments.revision,
            snapshot_dtype=arguments.snapshot_dtype,
            epsilon=arguments.epsilon,
            provenance=arguments.provenance,
            progress=progress,
        )
    show_agent(agent, arguments.json)


def _rebase(arguments: argparse.Namespace) -> None:
    from ..registering.rebase import rebase_agent
    from ..storage.registry import AgentRegistry

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
    show_agent(agent, arguments.json)


def _list(arguments: argparse.Namespace) -> None:
    from ..sharing.reading import open_registry

    agents = list(open_registry(arguments.registry, weights=False))
    if arguments.json:
        print(json.dumps([describe(agent) for agent in agents], indent=2))
        return
    rows = [("agent", "kind", "changed", "size", "created", "base model")]
    for agent in agents:
        summary = describe(agent)
        density = "-" if summary["density"] is None else f"{summary['density']:.2%}"
        rows.append(
            (
                str(agent),
                summary["kind"],
                density,
                size(summary["bytes"]),
                summary["created"],
                summary["base_model"]["name"],
            )
        )
    print_table(rows)


def _show(arguments: argparse.Namespace) -> None:
    from ..sharing.reading import open_registry

    registry = open_registry(arguments.registry, [arguments.agent], weights=False)
    show_agent(registry.get(arguments.agent), arguments.json)


def _restore(arguments: argparse.Namespace) -> None:
    from ..registering.restore import restore_agent
    from ..sharing.reading import open_registry

    with progress_bar() as progress:
        agent = restore_agent(
            open_registry(arguments.registry, [arguments.agent], progress=progress),
            arguments.agent,
            arguments.output_dir,
            base_model=arguments.base_model,
            max_shard_size=arguments.max_shard_size,
            progress=progress,
        )
    print(f"{agent} restored to {arguments.output_dir}")
