"""MergeKit, whose RAM methods are measured beside ours: its environment, its configuration, its fastest flags."""

import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.process import Command, Stopwatch, console


VERSION = "0.1.5"
# "tl" is tensor-local: it takes rho of each tensor where the paper takes that of the whole model.
METHODS = ("ramplus_tl", "ram")
# The paper's, as far as a method takes them.
PARAMETERS = {"ramplus_tl": {"r": 0.1, "alpha": 2.0, "epsilon": 1e-5}, "ram": {"epsilon": 1e-5}}
IMPORT = "start-up: mergekit's import torch"
# There is no tokenizer to copy.
ALWAYS = ["--no-copy-tokenizer", "--quiet"]


def find_mergekit(option: str | None, root: Path) -> Path | None:
    """
    Finds `mergekit-yaml`, or installs it in an environment of its own.

    Args:
        option (`str`, *optional*):
            Path of the program in its virtual environment, or `"none"` to do without.
        root (`Path`):
            Directory that receives the environment if there is no option.

    Returns:
        `Path`: the program, or `None` if there is none.
    """
    if option == "none":
        return None
    if option is not None:
        program = Path(option).resolve()
        if not (program.is_file() and program.with_name("python").is_file()):
            raise SystemExit(f"error: {program} is not the mergekit-yaml of a virtual environment")
        return program
    environment = root / "mergekit-venv"
    program = environment / "bin" / "mergekit-yaml"
    if not program.exists():
        # The same torch on both sides; a local version like +cpu is no matter of the requirement.
        torch = f"torch=={importlib.metadata.version('torch').partition('+')[0]}"
        console.print(f"[bold]Install mergekit {VERSION} with {torch}[/] into {environment}")
        try:
            subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
            pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet"]
            subprocess.run([*pip, torch, f"mergekit=={VERSION}"], check=True)
        except subprocess.CalledProcessError as error:
            console.print(f"mergekit is not measured: {error}")
            return None
    return program


def flags_to_try(has_gpu: bool) -> list[list[str]]:
    threads = ["--num-threads", str(len(os.sched_getaffinity(0)))]
    choices = [[], ["--lazy-unpickle"], ["--low-cpu-memory"], threads, ["--async-write"]]
    choices.append(["--lazy-unpickle", *threads, "--async-write"])
    return choices + [["--cuda"]] * has_gpu


@dataclass(frozen=True)
class MergeKit:
    """
    MergeKit, computing and writing in bfloat16.

    Args:
        program (`Path`):
            The program `mergekit-yaml`.
        flags (`list[str]`, *optional*):
            Flags of its performance.
    """

    program: Path
    flags: list[str] = field(default_factory=list)

    def merge(self, method: str, base: Path, agents: list[Path], scratch: Path) -> Command:
        config, output_dir = scratch / f"mergekit-{method}.yaml", scratch / "mergekit"
        content = {
            "merge_method": method,
            "base_model": str(base),
            "models": [{"model": str(path)} for path in agents],
            "parameters": PARAMETERS[method],
            "dtype": "bfloat16",
            # Without it ramplus_tl writes float32, which its lambda makes of bfloat16.
            "out_dtype": "bfloat16",
        }
        # JSON is YAML
        config.write_text(json.dumps(content, indent=2))
        arguments = [str(self.program), str(config), str(output_dir), *ALWAYS, *self.flags]
        return Command(f"mergekit {method}", arguments, output_dir, start_up=IMPORT)

    def start_up(self) -> Command:
        return Command(IMPORT, [str(self.program.with_name("python")), "-c", "import torch"])


def try_flags(
    program: Path, stopwatch: Stopwatch, base: Path, agents: list[Path], has_gpu: bool
) -> dict[str, list[dict[str, Any]]]:
    """Measures one merge with each choice of flags; the first choice twice, and its first run does not count."""
    choices = flags_to_try(has_gpu)
    tried = []
    for flags in [choices[0], *choices]:
        console.print(f"  mergekit {' '.join(flags)}")
        command = MergeKit(program, flags).merge(METHODS[0], base, agents, stopwatch.scratch)
        tried.append({"flags": flags, **stopwatch.measure(command)})
    return {"tried": tried[1:]}


def fastest_flags(tried: list[dict[str, Any]]) -> list[str]:
    """The flags of the shortest run that succeeded; none if none did."""
    successes = [run for run in tried if run["status"] == 0]
    return min(successes, key=lambda run: run["seconds"])["flags"] if successes else []
