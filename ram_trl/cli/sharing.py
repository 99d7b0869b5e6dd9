"""Commands that share agents with other machines: push, pull."""

import argparse
import dataclasses
import json
from typing import Any

from ..terminal import progress_bar
from .common import add_command, add_json, size


__all__ = ["add_commands"]

_PLACE = "hf://USER/REPO (the Hugging Face Hub), s3://BUCKET/FOLDER or another URL that fsspec knows, or a directory."


def add_commands(commands: Any) -> None:
    """Add them to the parser's commands."""
    push = add_command(commands, "push", _push, "Send agents to the Hugging Face Hub or another place.")
    push.add_argument("--to", required=True, metavar="URL", help=_PLACE)
    push.add_argument(
        "--public", action="store_true", help="If a repository has to be made on the Hub, make it public."
    )
    pull = add_command(commands, "pull", _pull, "Fetch agents from the Hugging Face Hub or another place.")
    pull.add_argument("--from", required=True, dest="source", metavar="URL", help=_PLACE)
    for sub in (push, pull):
        sub.add_argument(
            "--agents",
            nargs="+",
            help="NAME (its latest version), NAME@v2 or NAME@ALIAS. Default: the latest version of every agent and "
            "those that aliases name.",
        )
        sub.add_argument(
            "--overwrite_aliases",
            action="store_true",
            help="Move aliases that name another version where they arrive.",
        )
        add_json(sub)


def _push(arguments: argparse.Namespace) -> None:
    from ..sharing.push import push_agents

    with progress_bar() as progress:
        transfers = push_agents(
            arguments.registry,
            arguments.to,
            arguments.agents,
            private=not arguments.public,
            overwrite_aliases=arguments.overwrite_aliases,
            progress=progress,
        )
    _show(transfers, arguments.json)


def _pull(arguments: argparse.Namespace) -> None:
    from ..sharing.pull import pull_agents

    with progress_bar() as progress:
        transfers = pull_agents(
            arguments.registry,
            arguments.source,
            arguments.agents,
            overwrite_aliases=arguments.overwrite_aliases,
            progress=progress,
        )
    _show(transfers, arguments.json)


def _show(transfers: list[Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps([dataclasses.asdict(transfer) for transfer in transfers], indent=2))
        return
    for transfer in transfers:
        moved = f"{size(transfer.moved)} moved" if transfer.moved else "there already"
        renamed = "" if transfer.arrived == transfer.agent else f", as {transfer.arrived}"
        print("; ".join([f"{transfer.agent}: {moved}{renamed}", *transfer.notes]))
