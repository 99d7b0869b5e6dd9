"""
Runs the steps of a demonstration as subprocesses, shows how far they are, and repeats no finished step.

Every step is a command that a user could type. Its output is in `ROOT/logs`. A later run leaves out what is finished,
unless the command has changed or something that it builds on was made anew.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


POLL_SECONDS = 0.25
# Where there is no terminal to draw bars on, a line for each job in progress is printed at this interval.
REPORT_SECONDS = 15
LOG_TAIL_LINES = 30
# The bars of the pre-training and of the trainer, not those of loading and saving, which have other descriptions.
PROGRESS_BAR = re.compile(r"[\r\n](?:pre-training: )? *\d+%\|[^|]*\| *(\d+)/(\d+) \[")
LOGGED_REWARD = re.compile(r"'reward': '?([0-9.e+-]+)")

console = Console(highlight=False)


@dataclass
class Job:
    """
    One subprocess of the journey.

    Args:
        name (`str`):
            Name in the display, of the log file and of the marker of success.
        arguments (`list[str]`):
            Arguments of the Python interpreter.
        output_dir (`Path`):
            Directory that the job makes. What an interrupted run left of it is removed first.
        result (`Path`, *optional*):
            What must be there for the job to count as finished; by default its directory.
    """

    name: str
    arguments: list[str]
    output_dir: Path
    result: Path | None = None
    process: subprocess.Popen | None = None
    started: float = 0.0


def open_root(output_dir: str, name: str, made: tuple[str, ...], fresh: bool) -> Path:
    """
    Makes the directory of a demonstration, or opens what an earlier run made; anything else is refused.

    Args:
        output_dir (`str`):
            The directory.
        name (`str`):
            Name of the demonstration. A marker file tells its directories from any other.
        made (`tuple[str, ...]`):
            All that is ever removed from it.
        fresh (`bool`):
            Whether to remove that now.
    """
    root = Path(output_dir).resolve()
    marker = root / f".ram_trl_{name}"
    if root.exists() and not (root.is_dir() and (marker.exists() or not any(root.iterdir()))):
        print(f"error: {root} holds something that is not a {name}: choose another --output_dir", file=sys.stderr)
        sys.exit(2)
    root.mkdir(parents=True, exist_ok=True)
    marker.touch()
    if fresh:
        for entry in made:
            shutil.rmtree(root / entry, ignore_errors=True)
    return root


class Journey:
    """
    Runs stages of jobs, as many at a time as there are cores, and leaves out what an earlier run has finished.

    Args:
        root (`Path`):
            Directory of the quickstart. A marker in `root/finished` records the command and the time of every success.
    """

    def __init__(self, root: Path):
        self.root = root
        # Time at which the latest of the stages so far was finished: what is older than that is out of date.
        self.built_on = 0.0
        for name in ("logs", "finished"):
            (root / name).mkdir(parents=True, exist_ok=True)

    def log(self, job: Job) -> Path:
        return self.root / "logs" / f"{job.name}.log"

    def marker(self, job: Job) -> Path:
        return self.root / "finished" / f"{job.name}.json"

    def is_finished(self, job: Job) -> bool:
        if not (self.marker(job).exists() and (job.result or job.output_dir).exists()):
            return False
        marker = json.loads(self.marker(job).read_text())
        return marker["command"] == job.arguments and marker["finished"] >= self.built_on

    def run(self, title: str, jobs: list[Job]) -> None:
        """Runs the jobs of a stage that are not finished yet."""
        pending = [job for job in jobs if not self.is_finished(job)]
        if pending:
            console.print(f"[bold]{title}[/]")
            self.run_jobs(pending)
        else:
            console.print(f"[bold]{title}[/]: already there")
        self.built_on = max(json.loads(self.marker(job).read_text())["finished"] for job in jobs)

    def run_jobs(self, pending: list[Job]) -> None:
        parallel = min(len(pending), os.cpu_count() or 1)
        columns = [TextColumn("  {task.description:<16}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn()]
        columns.append(TextColumn("{task.fields[note]}"))
        bars, running, last_report = {}, [], time.monotonic()
        try:
            with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
                while pending or running:
                    while pending and len(running) < parallel:
                        running.append(pending.pop(0))
                        self.start(running[-1])
                        bars[running[-1].name] = progress.add_task(running[-1].name, total=None, note="")
                    time.sleep(POLL_SECONDS)
                    is_report_due = not console.is_terminal and time.monotonic() - last_report > REPORT_SECONDS
                    for job in list(running):
                        step, num_steps, note = read_progress(self.log(job))
                        progress.update(bars[job.name], completed=step, total=num_steps, note=note)
                        if is_report_due:
                            console.print(f"  .... {job.name:<16} step {step} of {num_steps or '?'}  {note}")
                        if job.process.poll() is not None:
                            running.remove(job)
                            progress.remove_task(bars[job.name])
                            self.finish(job, note)
                    if is_report_due:
                        last_report = time.monotonic()
        finally:
            for job in running:
                job.process.terminate()
                job.process.wait()

    def start(self, job: Job) -> None:
        self.marker(job).unlink(missing_ok=True)
        shutil.rmtree(job.output_dir, ignore_errors=True)
        # One thread: more gain little at this size, and cost a multiple of the time where the cores are shared.
        settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        job.started = time.monotonic()
        with self.log(job).open("wb") as log:
            job.process = subprocess.Popen(
                [sys.executable, *job.arguments], stdout=log, stderr=subprocess.STDOUT, env=os.environ | settings
            )

    def finish(self, job: Job, note: str) -> None:
        if job.process.returncode != 0:
            tail = self.log(job).read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            raise SystemExit("\n".join([*tail, f"{job.name} failed, its whole log is {self.log(job)}"]))
        seconds = round(time.monotonic() - job.started, 1)
        console.print(f"  [green]done[/] {job.name:<16} {seconds:5.1f} s  {note}")
        partial = self.marker(job).with_suffix(".partial")
        partial.write_text(json.dumps({"command": job.arguments, "finished": time.time(), "seconds": seconds}))
        partial.replace(self.marker(job))


def read_progress(log: Path) -> tuple[int, int | None, str]:
    """Reads the last progress bar and the rewards in a log: step, number of steps if there is a bar, note."""
    text = log.read_bytes().decode(errors="replace")
    bars, rewards = PROGRESS_BAR.findall(text), LOGGED_REWARD.findall(text)
    note = f"training reward {float(rewards[0]):.2f} -> {float(rewards[-1]):.2f}" if rewards else ""
    return (int(bars[-1][0]), int(bars[-1][1]), note) if bars else (0, None, note)
