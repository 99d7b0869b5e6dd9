"""The test's side of `run_forks.py`: children that are killed, refused system calls, and looked at afterwards."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest


__all__ = ["Forks", "calls_of", "has_strace", "tree"]

# Whatever a child does that is not killed takes less.
_PATIENCE = 120


class Forks:
    """A process that forks children and tells what became of them.

    Attributes:
        can_mount (`bool`):
            Whether it has a mount namespace of its own: what is mounted is then seen by its children alone.
    """

    def __init__(self):
        unshare = ["unshare", "-m"]
        self.can_mount = os.geteuid() == 0 and shutil.which("unshare") is not None
        self.can_mount = self.can_mount and subprocess.run([*unshare, "true"], capture_output=True).returncode == 0
        command = [*unshare * self.can_mount, sys.executable, str(Path(__file__).with_name("run_forks.py"))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> "Forks":
        return self

    def __exit__(self, *_) -> None:
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait(timeout=_PATIENCE)

    def start(self, action: str, arguments: dict[str, Any], **request: Any) -> int:
        """Have a child begin something; its process id."""
        print(json.dumps({"action": action, "arguments": arguments, **request}), file=self._server.stdin, flush=True)
        return self._answer()["pid"]

    def finish(self) -> dict[str, Any]:
        """What became of the child: its exit status, what it acknowledged, and its result or error."""
        return self._answer()

    def run(self, action: str, arguments: dict[str, Any], **request: Any) -> dict[str, Any]:
        """Have a child do something, and wait for it."""
        self.start(action, arguments, **request)
        return self.finish()

    def result(self, action: str, arguments: dict[str, Any], **request: Any) -> Any:
        """What a child that must not fail gives."""
        outcome = self.run(action, arguments, **request)
        assert outcome["status"] == 0 and "result" in outcome, outcome
        return outcome["result"]

    def traced(
        self, folder: Path, options: Sequence[str], action: str, arguments: dict[str, Any]
    ) -> tuple[dict[str, Any], list[str]]:
        """Have a child do something under `strace`; what became of it, and the lines of the trace."""
        gate, log = folder / "gate", folder / "strace"
        gate.unlink(missing_ok=True)
        os.mkfifo(gate)
        opened = os.open(gate, os.O_RDWR)
        pid = self.start(action, arguments, gate=str(gate))
        command = ["strace", "-f", "-p", str(pid), "-o", str(log), *options]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
            line = strace.stderr.readline()
            os.write(opened, b"!")
            outcome = self.finish()
            strace.stderr.read()
        os.close(opened)
        assert "attached" in line, line
        return outcome, log.read_text().splitlines()

    @contextlib.contextmanager
    def mounted(self, place: Path, *options: str) -> Iterator[Path]:
        """A directory on which something is mounted for the children; skips the test where that cannot be had."""
        if not self.can_mount:
            pytest.skip("only root may mount a file system")
        place.mkdir(exist_ok=True)
        self.mount(place, *options)
        try:
            yield place
        finally:
            self.unmount(place)

    def mount(self, place: Path, *options: str) -> None:
        done = self.result("command", {"words": ["mount", *options, str(place)]})
        if done["returncode"]:
            pytest.skip(f"mount {' '.join(options)} is not possible here: {done['stderr']}")

    def unmount(self, place: Path) -> None:
        done = self.result("command", {"words": ["umount", str(place)]})
        assert done["returncode"] == 0, done

    def _answer(self) -> dict[str, Any]:
        line = self._server.stdout.readline()
        assert line, "the forking process ended"
        return json.loads(line)


def calls_of(lines: list[str]) -> list[tuple[str, int]]:
    """System calls of a trace that did something: their names, and the how manieth of their thread each was."""
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for line in lines:
        if match := re.match(r"(\d+) +(\w+)\(", line):
            seen[match.groups()] += 1
            if " = -1 " not in line:
                found.append((match[2], seen[match.groups()]))
    return sorted(set(found))


def has_strace() -> None:
    """Skip a test where there is no strace, or it may not look at another process."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    with subprocess.Popen(["sleep", "60"]) as process:
        command = ["strace", "-p", str(process.pid), "-o", os.devnull]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
            line = strace.stderr.readline()
            process.kill()
        if "attached" not in line:
            pytest.skip(f"strace may not look at another process here: {line.strip()}")


def tree(path: Path) -> dict[str, tuple[int, bytes | None]]:
    """Everything below a directory: kinds, modes and contents."""
    return {
        str(entry.relative_to(path)): (entry.lstat().st_mode, entry.read_bytes() if entry.is_file() else None)
        for entry in path.rglob("*")
    }
