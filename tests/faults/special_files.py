"""Files that are no files, or change while they are read. `run_forks.py` runs it in children."""

import os
import random
import shutil
import signal
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

from ram_trl.errors import RamTrlError
from ram_trl.merging.merge import merge_agents
from ram_trl.registering.register import register_agent
from ram_trl.registering.restore import restore_agent
from ram_trl.storage.registry import AgentRegistry


__all__ = ["KINDS", "racing", "try_special_files"]

KINDS = ("symlink", "dangling symlink", "loop", "FIFO", "device", "folder", "socket", "hard link")
# Whatever is in a file's place, nobody may wait for it for longer.
_PATIENCE = 20


def _put(kind: str, path: Path, content: bytes, elsewhere: Path) -> None:
    """Something else in the place of a file."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    elsewhere.unlink(missing_ok=True)
    if kind == "whole":
        path.write_bytes(content)
    elif kind == "symlink":
        elsewhere.write_bytes(content)
        path.symlink_to(elsewhere)
    elif kind == "dangling symlink":
        path.symlink_to(elsewhere)
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "device":
        try:
            os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))
        except PermissionError:
            path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            # the name of a socket has to be short
            before = os.getcwd()
            os.chdir(path.parent)
            bound.bind(path.name)
            os.chdir(before)
    else:
        elsewhere.write_bytes(content)
        os.link(elsewhere, path)


def try_special_files(registry: str, agent: str, base: str, out: str):
    """Each kind in the place of each file of an agent, and of its base; what verifying and restoring said of it."""
    opened = AgentRegistry(registry)
    version = opened.get(agent).path
    # what a user names may be a link: the Hub's cache consists of them
    files = [*sorted(version.iterdir()), *(Path(base, name) for name in ("model.safetensors", "config.json"))]

    def go() -> dict[str, Any]:
        outcomes: dict[str, dict[str, str]] = {}
        signal.alarm(_PATIENCE * len(files) * len(KINDS))
        for path in files:
            content = path.read_bytes()
            for kind in KINDS:
                _put(kind, path, content, Path(out) / "elsewhere")
                started = time.monotonic()
                for name, action in (
                    ("verify", lambda: opened.get(agent).verify()),
                    ("restore", lambda: restore_agent(opened, agent, str(Path(out) / "restored"), base_model=base)),
                    ("register", lambda: register_agent(Path(out) / "new", "math", base, base_model=base)),
                ):
                    shutil.rmtree(Path(out) / "restored", ignore_errors=True)
                    try:
                        action()
                        outcome = "accepted"
                    except RamTrlError as error:
                        outcome = "refused" if str(path.parent) in str(error) else f"refused without its name: {error}"
                    except Exception as error:
                        outcome = f"{error!r:.200}"
                    outcomes.setdefault(path.name, {})[f"{kind}: {name}"] = outcome
                assert time.monotonic() - started < _PATIENCE, (path, kind)
            _put("whole", path, content, Path(out) / "elsewhere")
        return outcomes

    return go


def racing(registry: str, agent: str, base: str, out: str, seed: int, seconds: float):
    """Merge, verify and restore again and again while another process cuts, swaps and rewrites what they read."""
    chance, opened = random.Random(seed), AgentRegistry(registry)
    version = opened.get(agent).path
    files = [*sorted(version.iterdir()), Path(base, "model.safetensors")]
    whole = {path: path.read_bytes() for path in files}

    def disturb() -> None:
        while True:
            path = chance.choice(files)
            content, kind = whole[path], chance.choice(("cut", "swap", "rewrite", "remove", "empty"))
            if kind == "cut":
                os.truncate(path, chance.randrange(len(content)))
            elif kind == "empty":
                os.truncate(path, 0)
            elif kind == "remove":
                path.unlink()
            else:
                other = bytearray(content)
                other[chance.randrange(len(other))] ^= 1
                target = path.with_suffix(".other") if kind == "swap" else path
                target.write_bytes(other)
                if kind == "swap":
                    target.rename(path)
            time.sleep(chance.uniform(0, 0.02))
            staged = path.with_suffix(".whole")
            staged.write_bytes(content)
            staged.rename(path)
            time.sleep(chance.uniform(0, 0.04))

    def go() -> dict[str, Any]:
        outcomes: Counter[str] = Counter()
        foreign: list[str] = []
        merge_agents(opened, str(Path(out) / "reference"), agents=[agent], base_model=base)
        restore_agent(opened, agent, str(Path(out) / "restored"), base_model=base)
        known = {name: (Path(out) / name / "model.safetensors").read_bytes() for name in ("reference", "restored")}
        pid = os.fork()
        if pid == 0:
            try:
                disturb()
            finally:
                os._exit(1)
        deadline = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline:
                name = chance.choice(("reference", "restored"))
                shutil.rmtree(Path(out) / name, ignore_errors=True)
                try:
                    if name == "reference":
                        merge_agents(opened, str(Path(out) / name), agents=[agent], base_model=base)
                    else:
                        restore_agent(opened, agent, str(Path(out) / name), base_model=base)
                    same = (Path(out) / name / "model.safetensors").read_bytes() == known[name]
                    outcomes["whole" if same else "CHANGED"] += 1
                except RamTrlError as error:
                    outcomes[type(error).__name__] += 1
                except Exception as error:
                    foreign.append(f"{error!r:.300}")
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return {"outcomes": dict(outcomes), "foreign": foreign}

    return go
