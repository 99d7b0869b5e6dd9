"""The command line `ram-trl`: agents and generalists of a registry. A module for each group of commands."""

import argparse

from ..options import OptionParser
from ..terminal import exit_on_error
from . import agents, analysis, archives, generalists, history, lifecycle, sharing


__all__ = ["main"]


def main(argv: list[str] | None = None) -> None:
    """Entry point of `ram-trl` and `python -m ram_trl`."""
    with exit_on_error(OSError, UnicodeError):
        arguments = _parser().parse_args(argv)
        arguments.command(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(prog="ram-trl", description="Agents of reinforcement learning, registered.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (agents, history, lifecycle, archives, analysis, generalists, sharing):
        module.add_commands(commands)
    return parser
