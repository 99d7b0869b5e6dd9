"""The report of the benchmark: tables in Markdown of what was measured, medians of all runs."""

import importlib.metadata
import json
import os
import platform
import re
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.models import SIZES
from benchmarks.process import FLOOR, IMPORT_TORCH, OURS, SYNCED_FLOOR


NOTES = """\
Medians of whole processes that take turns. A round to warm up does not count, unless a command is measured once.

- peak: resident memory at its highest, mapped files included. Of several processes that of the largest.
- read, written: bytes of system calls, all processes of the command together. What is read through a mapped file, as
  the safetensors library does, is not among them; what the floor writes to /dev/null is.
- Merges, snapshots and restores of ram_trl wait until what they wrote is on the disk; all others do not.
- MergeKit computes in bfloat16, and its rho is that of each tensor; ours and plain compute in float32, and rho is that
  of the whole model.
- CPU seconds are those of user and system together, of all processes of the command."""

Runs = list[dict[str, Any]]


def build_report(folder: Path, gpu: str) -> tuple[dict[str, Any], str]:
    """
    Reads all that was measured.

    Args:
        folder (`Path`):
            Directory of the results.
        gpu (`str`):
            Name of the GPU, empty if there is none.

    Returns:
        `tuple[dict, str]`: the results, and the report in Markdown.
    """
    results: dict[str, Any] = {"machine": machine(gpu), "sizes": {}}
    for size in SIZES:
        files = sorted((folder / size).glob("*.json"))
        if files:
            results["sizes"][size] = {path.stem: json.loads(path.read_text()) for path in files}
    parts = ["# Benchmark", machine_part(results["machine"]), NOTES]
    for size, sections in results["sizes"].items():
        parts += size_parts(size, sections)
    parts += scaling_parts(results["sizes"])
    missing = [size for size in SIZES if size not in results["sizes"] and size != "tiny"]
    missing += ["a merge on a GPU"] * (not gpu)
    if missing:
        parts += ["## Not measured", ", ".join(missing)]
    return results, "\n\n".join(parts) + "\n"


def machine(gpu: str) -> dict[str, Any]:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": gpu,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers", "ram_trl")},
    }


def machine_part(described: dict[str, Any]) -> str:
    memory = f"{described['memory_bytes'] / 1e9:.1f} GB"
    versions = ", ".join(f"{name} {described[name]}" for name in ("python", "torch", "transformers", "ram_trl"))
    return f"{described['cpu']}, {described['cores']} cores, {memory}; GPU: {described['gpu'] or 'none'}; {versions}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table whose columns are aligned in plain text too."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(cells: list[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def middle(runs: Runs, *names: str) -> float:
    """Median over the runs of a value, or of the sum of several."""
    return median(sum(run[name] for name in names) for run in runs)


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.3f}"


def commands_table(commands: dict[str, Any]) -> str:
    rows = []
    for name, result in commands.items():
        if result["failure"]:
            rows.append([name, result["failure"], *["-"] * 5])
            continue
        runs = result["runs"]
        seconds = [run["seconds"] for run in runs]
        row = [name, f"{median(seconds):.2f}", f"{min(seconds):.2f} - {max(seconds):.2f}"]
        row += [f"{middle(runs, 'cpu_seconds'):.2f}"]
        row += [gigabytes(middle(runs, key)) for key in ("peak_bytes", "read_bytes", "written_bytes")]
        rows.append(row)
    return table(["", "wall s", "range", "CPU s", "peak GB", "read GB", "written GB"], rows)


def ratios_table(commands: dict[str, Any]) -> str:
    """How much more the other merges take than ours does, as ratios of medians."""
    if commands[OURS]["failure"]:
        return f"No ratios: ours failed, {commands[OURS]['failure']}."

    def figures(name: str) -> list[float]:
        runs, start_up = commands[name]["runs"], commands[name]["start_up"]
        wall = middle(runs, "seconds")
        beyond = wall - (middle(commands[start_up]["runs"], "seconds") if start_up else 0)
        peak, moved = middle(runs, "peak_bytes"), middle(runs, "read_bytes", "written_bytes")
        return [wall, beyond, peak, moved]

    ours, floor = figures(OURS), figures(FLOOR)
    rows = []
    for name, result in commands.items():
        if result["failure"] is None and (result["start_up"] or name in (FLOOR, SYNCED_FLOOR)):
            own = figures(name)
            ratios = [own_figure / figure for own_figure, figure in zip(own, ours, strict=True)]
            rows.append([name, *(f"{ratio:.2f}" for ratio in [*ratios, own[0] / floor[0]])])
    return table(["ratio to ours", "wall", "beyond start-up", "peak", "bytes", "wall / floor"], rows)


def seconds_table(rounds_of: dict[str, Runs]) -> str:
    """Medians of the times that were measured inside of a process."""
    header = list(next(iter(rounds_of.values()))[0])
    rows = [[name, *(f"{middle(rounds, key):.3f}" for key in header)] for name, rounds in rounds_of.items()]
    return table(["seconds", *header], rows)


def size_parts(size: str, sections: dict[str, Any]) -> list[str]:
    about = sections["agents"]
    checkpoint = about["checkpoint_bytes"]
    rows = [
        [
            agent["name"],
            f"{agent['density']:.2%}",
            f"{agent['paper_density']:.1%}",
            gigabytes(agent["bytes"]),
            f"{agent['bytes'] / checkpoint:.3f}",
        ]
        for agent in about["agents"]
    ]
    title = f"## {size}: {about['parameters']:,} parameters, {gigabytes(checkpoint)} GB"
    parts = [title, table(["agent", "density", "paper", "stored GB", "of the checkpoint"], rows)]
    writers = {"merge": merge_parts, "processes": processes_parts, "snapshot": snapshot_parts}
    for name, write in writers.items():
        if name in sections:
            heading = f"### {size}: {name} (runs: {sections[name]['settings']['runs']})"
            parts += [heading, *write(sections[name], checkpoint)]
    if "mergekit" in sections:
        parts += [f"### {size}: flags of mergekit", flags_table(sections["mergekit"]["tried"])]
    return parts


def merge_parts(section: dict[str, Any], checkpoint: int) -> list[str]:
    commands = section["commands"]
    parts = [commands_table(commands), ratios_table(commands)]
    parts.append("Phases inside of a process; planning is part of the first one:")
    parts.append(seconds_table(section["phases"]))
    rhos = {name: result["rho"] for name, result in commands.items() if "rho" in result}
    header = ["rho", *next(iter(rhos.values()), {})]
    rows = [[name, *(f"{rho:.6f}" for rho in ratios.values())] for name, ratios in rhos.items()]
    return [*parts, table(header, rows)]


def processes_parts(section: dict[str, Any], checkpoint: int) -> list[str]:
    succeeded = sum(result["failure"] is None for result in section["commands"].values())
    verdict = "the same" if section["identical_bytes"] else "NOT THE SAME"
    return [commands_table(section["commands"]), f"Weights of the {succeeded} that succeeded: {verdict} (sha256)."]


def snapshot_parts(section: dict[str, Any], checkpoint: int) -> list[str]:
    rates, ratios = [], []
    for agent, rounds in section["inside"].items():
        seconds = {name: middle(rounds, name) for name in rounds[0]}
        rates.append([agent, *(f"{checkpoint / 1e9 / value:.2f}" for value in seconds.values())])
        ratios.append([agent, *(f"{value / seconds['save_pretrained']:.2f}" for value in seconds.values())])
    actions = list(next(iter(section["inside"].values()))[0])
    return [
        commands_table(section["commands"]),
        "Inside of a process, taking turns; `snapshot` is what the callback does with a model in memory:",
        seconds_table(section["inside"]),
        table(["ratio to save_pretrained", *actions], ratios),
        table(["GB of checkpoint / s", *actions], rates),
    ]


def flags_table(tried: Runs) -> str:
    rows = []
    for run in tried:
        outcome = f"{run['seconds']:.2f}" if run["status"] == 0 else f"failed ({run['status']})"
        rows.append([" ".join(run["flags"]) or "none", outcome, gigabytes(run["peak_bytes"])])
    return table(["flags, one run each", "wall s", "peak GB"], rows)


def scaling_parts(sizes: dict[str, Any]) -> list[str]:
    """Time and memory by the number of parameters and by the number of agents."""
    parts, rows = [], []
    for size, sections in sizes.items():
        ours = sections["merge"]["commands"][OURS] if "merge" in sections else {"failure": "not measured"}
        if ours["failure"] is None:
            parameters = sections["agents"]["parameters"]
            beyond = middle(ours["runs"], "seconds") - import_seconds(sections["merge"])
            peak = gigabytes(middle(ours["runs"], "peak_bytes"))
            rows.append([size, f"{parameters:,}", f"{beyond:.2f}", f"{beyond / parameters * 1e9:.2f}", peak])
    if rows:
        header = ["size", "parameters", "beyond start-up s", "ns / parameter", "peak GB"]
        parts += ["## Scaling with parameters", table(header, rows)]
    for size, sections in sizes.items():
        if "scaling" in sections:
            parts += [f"## Scaling with agents, {size}", agents_table(sections["scaling"])]
    return parts


def agents_table(section: dict[str, Any]) -> str:
    rows = []
    for name, stored in section["stored_bytes"].items():
        result = section["commands"][name]
        if result["failure"]:
            rows.append([name, result["failure"], *["-"] * 4])
            continue
        wall, peak = middle(result["runs"], "seconds"), gigabytes(middle(result["runs"], "peak_bytes"))
        beyond = wall - import_seconds(section)
        rows.append([name, f"{wall:.2f}", f"{beyond:.2f}", gigabytes(stored), f"{beyond / stored * 1e9:.2f}", peak])
    return table(["", "wall s", "beyond start-up s", "stored GB", "ns / stored byte", "peak GB"], rows)


def import_seconds(section: dict[str, Any]) -> float:
    return middle(section["commands"][IMPORT_TORCH]["runs"], "seconds")
