"""Measures commands as whole processes that take turns, and keeps what was measured."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console


RUNNER = Path(__file__).with_name("runner.py")
# Rows that others are compared with.
OURS, FLOOR, SYNCED_FLOOR = "ours", "floor: cp + cat", "floor: cp + cat, sync"
IMPORT_TORCH = "start-up: import torch"
LOG_TAIL_LINES = 20

console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Command:
    """
    A command to measure.

    Args:
        name (`str`):
            Its row in the tables.
        arguments (`list[str]`):
            The program and its arguments.
        output_dir (`Path`, *optional*):
            What it makes; removed before every run.
        start_up (`str`, *optional*):
            Name of the command that measures what this one needs before it begins.
    """

    name: str
    arguments: list[str]
    output_dir: Path | None = None
    start_up: str | None = None


class Stopwatch:
    """
    Runs commands and measures them.

    Args:
        folder (`Path`):
            Where the logs of the commands go, and what is made meanwhile.
        runs (`int`):
            How often a command is measured.
    """

    def __init__(self, folder: Path, runs: int):
        self.runs = runs
        self.scratch = folder / "scratch"
        self.logs = folder / "logs"
        # modules are compiled once, as where nothing forbids it
        self.environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self.environment["HF_HUB_OFFLINE"] = "1"
        for path in (self.scratch, self.logs):
            path.mkdir(parents=True, exist_ok=True)

    def log(self, name: str) -> Path:
        return self.logs / f"{''.join(c if c.isalnum() else '-' for c in name)}.log"

    def measure(self, command: Command) -> dict[str, Any]:
        """Runs a command once. Outputs of earlier runs are removed before the time begins."""
        if command.output_dir is not None:
            remove(command.output_dir)
        result = self.scratch / "measured.json"
        runner = [sys.executable, "-I", "-S", str(RUNNER), str(result), str(self.log(command.name))]
        subprocess.run([*runner, *command.arguments], env=self.environment, check=True)
        measured = json.loads(result.read_text())
        outcome = failure_of(measured["status"]) or ""
        figures = f"{measured['seconds']:8.2f} s {measured['peak_bytes'] / 1e9:8.2f} GB"
        console.print(f"  {command.name:<40} {figures}  {outcome}".rstrip())
        return measured

    def take_turns(self, commands: list[Command]) -> dict[str, Any]:
        """
        Measures commands in rounds, so that what changes on the machine meets all of them alike.

        The first of several rounds warms up and does not count. A command that fails in a round is not run again.

        Returns:
            `dict`: for every command its arguments, all its runs, its failure, and what its output is.
        """
        results = {
            command.name: {"arguments": command.arguments, "start_up": command.start_up, "failure": None, "runs": []}
            for command in commands
        }
        for turn in range(self.runs + (self.runs > 1)):
            console.print(f"  [dim]round {turn + 1}[/]")
            for command in commands:
                result = results[command.name]
                if result["failure"] is not None:
                    continue
                measured = self.measure(command)
                result["failure"] = failure_of(measured["status"])
                result["runs"].append(measured)
                if turn == 0 and command.output_dir is not None and result["failure"] is None:
                    result |= fingerprint(command.output_dir)
        for command in commands:
            if command.output_dir is not None:
                remove(command.output_dir)
            if self.runs > 1:
                results[command.name]["warm_up"] = results[command.name]["runs"].pop(0)
        return results

    def step(self, name: str, arguments: list[str]) -> str:
        """Runs a Python program that has to succeed, and returns what it prints."""
        console.print(f"  {name}")
        with self.log(name).open("w") as log:
            done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=log, text=True)
        if done.returncode != 0:
            tail = self.log(name).read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            raise SystemExit("\n".join([*tail, f"{name} failed, its whole log is {self.log(name)}"]))
        return done.stdout


def kept(path: Path, settings: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What an earlier run has measured with the same settings, or else what `make` measures now."""
    if path.exists():
        result = json.loads(path.read_text())
        if result["settings"] == settings:
            console.print("  already there")
            return result
    result = {"settings": settings, **make()}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=2) + "\n")
    partial.replace(path)
    return result


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def failure_of(status: int) -> str | None:
    if status < 0:
        return f"killed by signal {-status}"
    return f"exit code {status}" if status else None


def fingerprint(output_dir: Path) -> dict[str, Any]:
    """The digest of a model's weight files, and the rho of each agent if there is a report."""
    result: dict[str, Any] = {}
    files = sorted(output_dir.glob("*.safetensors"))
    if files:
        digest = hashlib.sha256()
        for path in files:
            with path.open("rb") as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
        result["sha256"] = digest.hexdigest()
    report = output_dir / "merge_report.json"
    if report.exists():
        result["rho"] = {agent["name"]: float(agent["rho"]) for agent in json.loads(report.read_text())["agents"]}
    return result
