"""Commands that ask a registry about its past: search, log, compare."""

import argparse
import dataclasses
import json
from typing import Any

from ..arithmetic.defaults import DEFAULT_EPSILON
from ..terminal import progress_bar
from .common import ONE_AGENT, add_command, add_json, describe, print_table, size


__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add them to the parser's commands."""
    search = add_command(commands, "search", _search, "Find versions of agents by what is recorded of them.")
    search.add_argument("--base", help="Part of the base model's name, or the beginning of its digest or revision.")
    search.add_argument("--kind", help="full or lora.")
    search.add_argument("--tag", nargs="+", default=[], metavar="TAG", help="Tags that it carries.")
    search.add_argument("--alias", help="Alias that means it.")
    for name, which in (("min", "Smallest"), ("max", "Largest")):
        text = f"{which} share of changed parameters, from 0 to 1 (not known of LoRA agents)."
        search.add_argument(f"--{name}_density", type=float, help=text)
    search.add_argument("--since", metavar="DATE", help="Registered then or later, like 2026-11-22; UTC.")
    search.add_argument("--until", metavar="DATE", help="Registered on that day or earlier.")
    search.add_argument(
        "--metric", nargs="+", default=[], metavar="CONDITION", help="On the last metrics of training: 'reward>0.5'."
    )
    search.add_argument("--text", help="Part of any text that is recorded: of a reward's name, an option, a commit.")
    search.add_argument("--latest", action="store_true", help="Only the latest version of every agent.")
    log = add_command(commands, "log", _log, "Show what came of what: agents and generalists in the order of time.")
    log.add_argument("name", nargs="?", metavar="NAME", help="Agent or generalist, NAME or NAME@v2. Default: all.")
    compare = add_command(commands, "compare", _compare, "Compare two agents, or two versions of one.")
    for which in ("first", "second"):
        compare.add_argument(which, metavar=which.upper(), help=ONE_AGENT)
    text = f"Larger changes count (default {DEFAULT_EPSILON:g}, or what the agents were stored with)."
    compare.add_argument("--epsilon", type=float, help=text)
    compare.add_argument("--base_model", help="Where the base model is now, if not where it was.")
    compare.add_argument("--records_only", action="store_true", help="Compare records alone; needs no base model.")
    for sub in (search, log, compare):
        add_json(sub)


def _search(arguments: argparse.Namespace) -> None:
    from ..lifecycle.search import Query, search_agents
    from ..sharing.reading import open_registry

    names = ("base", "kind", "alias", "min_density", "max_density", "since", "until", "text", "latest")
    options = {name: getattr(arguments, name) for name in names}
    query = Query(tags=arguments.tag, metrics=arguments.metric, **options)
    found = search_agents(open_registry(arguments.registry, weights=False), query)
    summaries = [{**describe(one.agent), "aliases": one.aliases, "tags": one.tags} for one in found]
    if arguments.json:
        print(json.dumps(summaries, indent=2))
        return
    labels = [name for name in ("aliases", "tags") if any(summary[name] for summary in summaries)]
    rows = [("agent", "kind", "changed", "size", "created", *query.metric_names, *labels, "base model")]
    for one, summary in zip(found, summaries, strict=True):
        density = "-" if summary["density"] is None else f"{summary['density']:.2%}"
        metrics = (f"{summary['training']['metrics'][name]:.4g}" for name in query.metric_names)
        marks = (" ".join(summary[name]) for name in labels)
        cells = (str(one.agent), summary["kind"], density, size(summary["bytes"]), summary["created"])
        rows.append((*cells, *metrics, *marks, summary["base_model"]["name"]))
    print_table(rows)


def _log(arguments: argparse.Namespace) -> None:
    from ..lifecycle.lineage import lineage
    from ..sharing.reading import open_registry

    events = lineage(open_registry(arguments.registry, weights=False), arguments.name)
    if arguments.json:
        print(json.dumps([dataclasses.asdict(event) for event in events], indent=2))
        return
    rows = [("created", "version", "from", "how", "")]
    for event in events:
        parents = [f"{parent} (gone)" if parent in event.missing else parent for parent in event.parents]
        state = ["latest"] if event.is_latest else []
        state += [event.verdict] if event.verdict else []
        marks = ", ".join((*state, *event.aliases, *(f"#{tag}" for tag in event.tags)))
        rows.append((event.created, event.version, " ".join(parents) or event.base_model, event.how, marks))
    print_table(rows)


def _compare(arguments: argparse.Namespace) -> None:
    from ..analyzing.compare import compare_agents, format_comparison
    from ..sharing.reading import open_registry

    options = {name: getattr(arguments, name) for name in ("epsilon", "base_model", "records_only")}
    both = [arguments.first, arguments.second]
    with progress_bar() as progress:
        registry = open_registry(arguments.registry, both, weights=not arguments.records_only, progress=progress)
        data = compare_agents(registry, *both, **options, progress=progress)
    print(json.dumps(data, indent=2) if arguments.json else format_comparison(data))
