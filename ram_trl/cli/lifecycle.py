"""Commands for a registry over the years: verify, gc, alias, tag, remove, recover, quarantine."""

import argparse
import dataclasses
import json
import sys
from typing import Any

from ..errors import ConfigError, CorruptedFileError
from ..table import printable
from ..terminal import progress_bar
from .common import add_command, add_json, print_table, size


__all__ = ["add_commands"]

# Characters of a reason in a table; all of it is in quarantine/agents/math/v000003.json.
_REASON = 80


def add_commands(commands: Any) -> None:
    """Add them to the parser's commands."""
    text = "Compare agents and generalists with their digests. Exit code 1 if something is not what was written."
    verify = add_command(commands, "verify", _verify, text)
    _add_subject(verify, "all of its versions")
    verify.add_argument(
        "--all", action="store_true", help="Every version, not only the newest; and what is left over."
    )
    verify.add_argument("--quarantine", action="store_true", help="Move what fails out of sight, into quarantine.")
    verify.add_argument(
        "--public_key", metavar="FILE", help="Agents have to be signed with the other half (ram-trl sign)."
    )
    add_json(verify)
    text = (
        "Remove what nobody needs: the trash, what crashes left behind, labels and Fisher of versions that are gone."
    )
    gc = add_command(commands, "gc", _gc, text)
    gc.add_argument("--dry_run", action="store_true", help="Say what would be removed, and remove nothing.")
    text = "Hours without a write after which what is being written counts as left behind (default 24)."
    gc.add_argument("--min_age", type=float, default=24.0, help=text)
    gc.add_argument("--quarantine", action="store_true", help="Empty the quarantine too.")
    alias = add_command(commands, "alias", _alias, "Give a version a name that can move: math@best. Or list them.")
    _add_subject(alias, "its newest version")
    alias.add_argument("--set", metavar="ALIAS", help="Have ALIAS mean this version, whatever it meant before.")
    alias.add_argument("--drop", metavar="ALIAS", help="Remove ALIAS, not the version.")
    tag = add_command(commands, "tag", _tag, "Put tags on a version, take them off, or list them.")
    _add_subject(tag, "its newest version")
    tag.add_argument("--add", nargs="+", metavar="TAG", default=[], help="Tags to put on it.")
    tag.add_argument("--drop", nargs="+", metavar="TAG", default=[], help="Tags to take off.")
    remove = add_command(commands, "remove", _remove, "Move a version, or all of them, into the trash.")
    _add_subject(remove, "all of its versions")
    remove.add_argument("--force", action="store_true", help="Also an agent that a generalist was merged of.")
    text = "Bring back a version from trash or quarantine, or all in the trash. Without a name: list what is there."
    recover = add_command(commands, "recover", _recover, text)
    _add_subject(recover, "all of its versions in the trash")
    text = "Move a version that is damaged out of sight. What is intact stays, unless you give a reason."
    quarantine = add_command(commands, "quarantine", _quarantine, text)
    _add_subject(quarantine, "not enough here")
    quarantine.add_argument("--reason", help="Why, if it is not that its files fail verification.")


def _add_subject(sub: argparse.ArgumentParser, name_alone: str) -> None:
    for kind in ("agent", "generalist"):
        sub.add_argument(f"--{kind}", help=f"{kind.capitalize()}: NAME@v2, NAME@ALIAS, or NAME ({name_alone}).")


def _subject(arguments: argparse.Namespace) -> tuple[Any, str]:
    """Where the versions are that a command is about, and which they are: the registry or its generalists, and a spec.

    Raises:
        ConfigError: if none or two were named.
    """
    from ..storage.registry import AgentRegistry

    registry = AgentRegistry(arguments.registry)
    if (arguments.agent is None) == (arguments.generalist is None):
        raise ConfigError("name what it is about: --agent or --generalist")
    if arguments.agent is not None:
        return registry, arguments.agent
    registry.check_exists()
    return registry.generalists, arguments.generalist


def _verify(arguments: argparse.Namespace) -> None:
    from ..lifecycle.verify import verify_registry
    from ..storage.registry import AgentRegistry

    registry, signatures = AgentRegistry(arguments.registry), []
    if arguments.public_key is not None:
        from ..lifecycle.signing import verify_signatures

        if arguments.generalist is not None:
            raise ConfigError("--public_key is for agents: leave out --generalist")
        signatures = verify_signatures(registry, arguments.public_key, arguments.agent, arguments.all)
    with progress_bar() as progress:
        verdicts = signatures + verify_registry(
            registry,
            agent=arguments.agent,
            generalist=arguments.generalist,
            everything=arguments.all,
            quarantine=arguments.quarantine,
            progress=progress,
        )
    failed = [verdict for verdict in verdicts if verdict.problem is not None]
    if arguments.json:
        print(json.dumps([dataclasses.asdict(verdict) for verdict in verdicts], indent=2))
    else:
        for verdict in verdicts:
            state = "FAILED" if verdict.problem else "intact" if verdict.bytes or not verdict.notes else "note"
            # most problems begin with what has it
            problem = (verdict.problem or "").removeprefix(f"{verdict.what}: ").removeprefix(f"{verdict.what} ")
            words = [problem, *verdict.notes, "moved into quarantine" if verdict.quarantined else ""]
            _print_line(f"{state:<7} {': '.join([verdict.what, '; '.join(filter(None, words))]).removesuffix(': ')}")
        intact = sum(verdict.problem is None and verdict.bytes > 0 for verdict in verdicts)
        print(f"{intact} intact, {len(failed)} failed")
    if failed:
        sys.exit(1)


def _gc(arguments: argparse.Namespace) -> None:
    from ..lifecycle.gc import collect_garbage, find_garbage
    from ..storage.registry import AgentRegistry

    registry = AgentRegistry(arguments.registry)
    options = {"min_age": arguments.min_age, "quarantine": arguments.quarantine}
    if arguments.dry_run:
        garbage = find_garbage(registry, **options)
    else:
        with progress_bar() as progress:
            garbage = collect_garbage(registry, **options, progress=progress)
    for one in garbage:
        _print_line(f"{one.path} ({one.what}, {size(one.bytes)})")
    state = "would be removed" if arguments.dry_run else "removed"
    print(f"{len(garbage)} {state}, {size(sum(one.bytes for one in garbage))}")


def _alias(arguments: argparse.Namespace) -> None:
    store, spec = _subject(arguments)
    name, numbers = store.store.find(spec)
    labels = store.labels(name)
    if arguments.drop is not None:
        labels.drop_alias(arguments.drop)
        print(f"{name}@{arguments.drop} means nothing any more")
    if arguments.set is not None:
        labels.set_alias(arguments.set, store.get(f"{name}@v{numbers[-1]}").version)
        print(f"{name}@{arguments.set} is {name}@v{numbers[-1]}")
    if arguments.drop is arguments.set is None:
        print_table([("alias", "version"), *((f"{name}@{alias}", f"v{n}") for alias, n in labels.aliases().items())])


def _tag(arguments: argparse.Namespace) -> None:
    store, spec = _subject(arguments)
    name, numbers = store.store.find(spec)
    labels = store.labels(name)
    for tag in arguments.add:
        labels.add_tag(numbers[-1], tag)
    for tag in arguments.drop:
        labels.drop_tag(numbers[-1], tag)
    tags = labels.tags()
    shown = [numbers[-1]] if arguments.add or arguments.drop else numbers
    print_table([("version", "tags"), *((f"{name}@v{n}", " ".join(tags.get(n, ["-"]))) for n in shown)])


def _remove(arguments: argparse.Namespace) -> None:
    store, spec = _subject(arguments)
    options = {"force": arguments.force} if arguments.agent is not None else {}
    for version in store.remove(spec, **options):
        print(f"{version} removed, into the trash: ram-trl recover brings it back, ram-trl gc empties the trash")


def _recover(arguments: argparse.Namespace) -> None:
    if arguments.agent is arguments.generalist is None:
        _list_hidden(arguments.registry)
        return
    store, spec = _subject(arguments)
    for version in store.recover(spec):
        print(f"{version} is there again")


def _list_hidden(path: str) -> None:
    from ..lifecycle.verify import hidden_versions
    from ..storage.names import QUARANTINE, TRASH
    from ..storage.registry import AgentRegistry
    from ..storage.trash import read_note

    registry = AgentRegistry(path)
    registry.check_exists()
    rows = [("what", "version", "where", "why")]
    for place in (TRASH, QUARANTINE):
        for store, name, number in hidden_versions(registry, place):
            note = read_note(store.hidden(place).version_dir(name, number))
            reason = printable(str(note.get("reason", "removed")))
            short = f"{reason[:_REASON]}..." if len(reason) > _REASON else reason
            rows.append((store.kind, f"{name}@v{number}", place, short))
    print_table(rows)


def _quarantine(arguments: argparse.Namespace) -> None:
    store, spec = _subject(arguments)
    reason = arguments.reason
    if reason is None:
        try:
            store.get(spec).verify()
        except CorruptedFileError as error:
            # what a newer version wrote, or what cannot be read just now, is not damaged
            reason = str(error)
        else:
            raise ConfigError(f"{spec} is intact: say why with --reason, or remove it (ram-trl remove)")
    print(f"{store.quarantine(spec, reason)} is in quarantine: {printable(reason)}")


def _print_line(text: str) -> None:
    print(printable(text))
