"""
Time, memory and bytes of merges and snapshots, measured as whole processes beside MergeKit and a plain merge.

```sh
python recipes/benchmark.py
python recipes/benchmark.py --sizes 0.5B --only merge,snapshot --runs 3
```

The models are made here: Qwen2 shapes, random weights, agents that changed as much of them as the paper's. Commands
are measured that a user could type; their output is in `<output_dir>/logs`. What is measured is kept in
`<output_dir>/results` and not measured again; `--fresh` measures anew. The report is `<output_dir>/report.md`.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import ram_trl
from benchmarks.mergekit import MergeKit, find_mergekit
from benchmarks.models import SIZES
from benchmarks.process import console, kept
from benchmarks.report import build_report
from benchmarks.sections import Benchmark


SECTION_NAMES = ("merge", "processes", "snapshot", "scaling")
# Tells a directory of the benchmark from any other; only what is named here is ever removed from it.
MARKER = ".ram_trl_benchmark"
SCRATCH = "scratch"
MEASURED = ("results", "registries", "logs", SCRATCH)


def names_of(known: Iterable[str], text: str) -> list[str]:
    """The value of an option: some of the known names, with commas between them."""
    chosen = text.split(",")
    if not set(chosen) <= set(known):
        raise argparse.ArgumentTypeError(f"{text} is not of {','.join(known)}")
    return chosen


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="benchmark", help="directory of everything that is made")
    sizes = f"sizes of the models, of {', '.join(SIZES)} (default: 0.5B,1.5B, with a GPU 7B too)"
    parser.add_argument("--sizes", type=lambda text: names_of(SIZES, text), help=sizes)
    sections = f"what to measure, of {', '.join(SECTION_NAMES)} (default: all)"
    parser.add_argument("--only", type=lambda text: names_of(SECTION_NAMES, text), help=sections)
    runs = "how often everything is measured, after a round to warm up if it is more than once"
    parser.add_argument("--runs", type=int, default=5, help=runs)
    counts = "numbers of agents of the first size that are merged to see how that scales"
    parser.add_argument("--agents", type=lambda text: [*map(int, text.split(","))], default=[3, 8, 32], help=counts)
    mergekit = "mergekit-yaml of a virtual environment, or none (default: install one in the output directory)"
    parser.add_argument("--mergekit", help=mergekit)
    parser.add_argument("--fresh", action="store_true", help="register and measure again; the models are kept")
    return parser.parse_args()


def open_directory(path: str, fresh: bool) -> Path:
    """The directory of the benchmark, without what a run that was interrupted left, and empty of results if fresh."""
    root = Path(path).resolve()
    if root.exists() and not (root.is_dir() and ((root / MARKER).exists() or not any(root.iterdir()))):
        print(f"error: {root} holds something that is not a benchmark: choose another --output_dir", file=sys.stderr)
        sys.exit(2)
    root.mkdir(parents=True, exist_ok=True)
    (root / MARKER).touch()
    for name in MEASURED if fresh else (SCRATCH,):
        shutil.rmtree(root / name, ignore_errors=True)
    return root


def gpu_name() -> str:
    """Name of the GPU that torch computes on, empty if there is none."""
    if shutil.which("nvidia-smi") is None:
        return ""
    script = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


def digest_of_sources() -> str:
    """Of the code that is measured: what another code took is measured again."""
    digest = hashlib.sha256()
    for path in sorted(Path(ram_trl.__file__).parent.rglob("*.[pch]*")):
        if path.suffix in (".py", ".c", ".h"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def run_section(benchmark: Benchmark, name: str, mergekit: MergeKit | None, counts: list[int]) -> None:
    """Measures a section, unless that has been done with the same settings."""
    console.print(f"[bold]{benchmark.size}: {name}[/]")
    program = None if mergekit is None else [str(mergekit.program), *mergekit.flags]
    makers: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
        "merge": ({"mergekit": program}, partial(benchmark.merge, mergekit)),
        "processes": ({}, benchmark.processes),
        "snapshot": ({}, benchmark.snapshot),
        "scaling": ({"agents": counts}, partial(benchmark.scaling, counts)),
    }
    settings, make = makers[name]
    settings |= {"runs": benchmark.runs, "gpu": benchmark.gpu, "ram_trl": digest_of_sources()}
    kept(benchmark.results / f"{name}.json", settings, make)


def main() -> None:
    args = parse_args()
    root = open_directory(args.output_dir, args.fresh)
    sections, gpu = args.only or SECTION_NAMES, gpu_name()
    sizes = args.sizes or ["0.5B", "1.5B"] + ["7B"] * bool(gpu)
    program = find_mergekit(args.mergekit, root) if "merge" in sections else None
    mergekit = None
    for size in sizes:
        console.print(f"[bold]{size}: models and registry[/]")
        benchmark = Benchmark(root, size, args.runs, gpu)
        benchmark.prepare()
        if program and not mergekit:
            mergekit = benchmark.tune_mergekit(program)
        for name in sections:
            if name != "scaling" or size == sizes[0]:
                run_section(benchmark, name, mergekit, args.agents)
    shutil.rmtree(root / SCRATCH)
    results, report = build_report(root / "results", gpu)
    (root / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    (root / "report.md").write_text(report)
    print(report)
    console.print(f"results.json and report.md are in {root}")


if __name__ == "__main__":
    main()
