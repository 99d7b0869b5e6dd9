"""Commands about agents that go elsewhere: as single files (export, import), and whom they are from (sign)."""

import argparse
import json
from typing import Any

from ..terminal import progress_bar
from .common import ONE_AGENT, add_command, add_json, describe, size


__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add them to the parser's commands."""
    text = "Write one version of an agent as one file, to be imported into another registry."
    export = add_command(commands, "export", _export, text, agent=ONE_AGENT)
    export.add_argument("--output", required=True, help="File to create (a tar file).")
    text = "Take a version of an agent from a file that export wrote; every byte is checked."
    take = add_command(commands, "import", _import, text)
    take.add_argument("archive", metavar="FILE", help="What export wrote.")
    take.add_argument("--agent", metavar="NEW", help="Another name for the agent; its manifest then says so.")
    add_json(take)
    text = "Verify a version of an agent and sign it, with a key in a file; verify --public_key checks that."
    sign = add_command(commands, "sign", _sign, text, agent=ONE_AGENT)
    sign.add_argument("--private_key", required=True, metavar="FILE", help="Elliptic curve key (PEM, no password).")


def _export(arguments: argparse.Namespace) -> None:
    from ..lifecycle.archive import export_agent
    from ..sharing.reading import open_registry

    with progress_bar() as progress:
        registry = open_registry(arguments.registry, [arguments.agent], progress=progress)
        agent = export_agent(registry, arguments.agent, arguments.output, progress)
    files = agent.manifest.files.values()
    print(f"{agent} exported to {arguments.output} ({size(sum(file.size for file in files))})")


def _import(arguments: argparse.Namespace) -> None:
    from ..lifecycle.archive import import_agent

    with progress_bar() as progress:
        agent, is_new = import_agent(arguments.registry, arguments.archive, arguments.agent, progress)
    if arguments.json:
        print(json.dumps({**describe(agent), "new": is_new}, indent=2))
    elif is_new:
        print(f"{agent} imported from {arguments.archive}")
    else:
        print(f"{agent} is what {arguments.archive} holds: nothing to do")


def _sign(arguments: argparse.Namespace) -> None:
    from ..lifecycle.signing import sign_agent, signature_path
    from ..storage.registry import AgentRegistry

    with progress_bar() as progress:
        agent = sign_agent(AgentRegistry(arguments.registry), arguments.agent, arguments.private_key, progress)
    print(f"{agent} is signed: {signature_path(agent)}")
