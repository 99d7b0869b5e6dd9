"""Forks children of a process that has imported everything: a snapshot in a new process takes no seconds to begin.

Reads requests, a JSON object a line, and answers each with two lines: `{"pid"}` when the child is about to begin, and
`{"status", "done", ...}` when it has ended. What a child did is written to memory that it shares with this process, so
that neither a signal nor a failing system call keeps it from being known. `forks.py` is the other side.
"""

import contextlib
import fcntl
import functools
import importlib
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from mutants import try_headers, try_mutants
from names import try_file_names, try_names, try_pickles, try_shard_names, try_tensor_names
from peft import PeftModel
from ranks import joins, merges
from special_files import racing, try_special_files
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from ram_trl import cli
from ram_trl.distributed import SINGLE
from ram_trl.errors import RamTrlError
from ram_trl.merging import integrate, merge
from ram_trl.registering import live, register, restore
from ram_trl.storage.registry import AgentRegistry


_SHARED_BYTES = 1 << 20
# _IOR('X', 125, __u32) of ext4, and its flag that leaves the journal unwritten
_EXT4_IOC_SHUTDOWN, _NO_LOG_FLUSH = 0x8004587D, 2


class Shared:
    """What a child says, in memory that outlives it: versions that were acknowledged, then its last word."""

    def __init__(self):
        self._memory = mmap.mmap(-1, _SHARED_BYTES)

    def clear(self) -> None:
        self._memory[:16] = bytes(16)

    def acknowledge(self, version: int) -> None:
        count = len(self.acknowledged())
        self._memory[16 + 4 * count : 20 + 4 * count] = version.to_bytes(4, "little")
        self._memory[0:8] = (count + 1).to_bytes(8, "little")

    def acknowledged(self) -> list[int]:
        count = int.from_bytes(self._memory[0:8], "little")
        return [int.from_bytes(self._memory[16 + 4 * i : 20 + 4 * i], "little") for i in range(count)]

    def finish(self, outcome: dict[str, Any]) -> None:
        text = json.dumps(outcome).encode()
        middle = _SHARED_BYTES // 2
        self._memory[middle : middle + len(text)] = text
        self._memory[8:16] = len(text).to_bytes(8, "little")

    def outcome(self) -> dict[str, Any]:
        middle, length = _SHARED_BYTES // 2, int.from_bytes(self._memory[8:16], "little")
        return json.loads(self._memory[middle : middle + length]) if length else {}


SHARED = Shared()


@functools.cache
def trained_model(model: str, base: str, adapter: str | None) -> nn.Module:
    """A model in memory, as at the end of its training. The server loads it for all of its children."""
    if adapter is None:
        return AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), adapter)


# What children do: each of these prepares, and gives what is then done.


def snapshots(registry: str, agent: str, model: str, base: str, times: int = 1, via: str = "checkpoint", **options):
    """Register, again and again."""
    if options.get("without_fsync"):
        os.fsync = lambda descriptor: None
    if via == "checkpoint":

        def once() -> int:
            return register.register_agent(registry, agent, model, base_model=base).version
    else:
        trained = trained_model(model, base, options.get("adapter") if via == "live lora" else None)
        registration = live.LiveRegistration(
            registry=AgentRegistry(registry),
            agent=agent,
            base_model=base,
            revision=None,
            snapshot_dtype="auto",
            epsilon=1e-5,
        )
        registration.opened = (base, None)

        def once() -> int:
            return registration.register(trained, SINGLE, None, {}).version

    def go() -> None:
        for _ in range(times):
            SHARED.acknowledge(once())

    return go


def writers(jobs: list[dict[str, Any]]):
    """Several processes register at once; what each of them was told."""

    def go() -> list[dict[str, Any]]:
        pipes = []
        for job in jobs:
            reading, writing = os.pipe()
            if os.fork() == 0:
                SHARED.__init__()
                try:
                    snapshots(**job)()
                    outcome = {"versions": SHARED.acknowledged()}
                except Exception as error:
                    outcome = {"versions": SHARED.acknowledged(), "error": repr(error)}
                with open(writing, "w") as pipe:
                    json.dump(outcome, pipe)
                os._exit(0)
            os.close(writing)
            pipes.append(reading)
        outcomes = [json.loads(open(pipe).read()) for pipe in pipes]
        for _ in jobs:
            os.wait()
        return outcomes

    return go


def merged(registry: str, output_dir: str, **options):
    return lambda: merge.merge_agents(registry, output_dir, **options)["agents"] and None


def integrated(registry: str, generalist: str):
    return lambda: integrate.integrate_agents(registry, generalist) and None


def restored(registry: str, agent: str, output_dir: str):
    return lambda: restore.restore_agent(registry, agent, output_dir) and None


def examined(registry: str, agent: str, above: int = 0):
    """Every visible version above a number and whether it verifies, what else is there, and a digest of all bytes."""

    def go() -> dict[str, Any]:
        opened, valid = AgentRegistry(registry), {}
        for number in filter(above.__lt__, opened.versions(agent)):
            try:
                opened.get(f"{agent}@v{number}").verify()
                valid[number] = True
            except RamTrlError as error:
                valid[number] = str(error)
        hasher = blake3()
        for path in [] if above else sorted(Path(registry).rglob("*")):
            if path.is_file() and ".tmp-" not in str(path):
                hasher.update(f"{path} {path.stat().st_mode}\n".encode() + path.read_bytes())
        left = sorted(path.name for path in Path(registry).rglob(".tmp-*"))
        return {"valid": valid, "left": left, "bytes": hasher.hexdigest()}

    return go


def collected(registry: str):
    """What `ram-trl gc` leaves of what was not finished."""

    def go() -> list[str]:
        sys.argv = ["ram-trl", "gc", "--registry", registry, "--min_age", "0"]
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr):
            cli.main()
        return sorted(path.name for path in Path(registry).rglob(".tmp-*"))

    return go


def command(words: list[str]):
    """A command in the mount namespace of this process."""

    def go() -> dict[str, Any]:
        done = subprocess.run(words, capture_output=True, text=True)
        return {"returncode": done.returncode, "stderr": done.stderr}

    return go


def free(path: str):
    """Bytes that are free on a disk."""

    def go() -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    return go


def filled(path: str, left: int):
    """Fill up the disk that a file is on, but for some bytes; a negative number frees it."""

    def go() -> None:
        Path(path).unlink(missing_ok=True)
        if left < 0:
            return
        with open(path, "wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
            file.truncate(max(0, file.tell() - left))

    return go


_LOOKING = (examined, collected, command, free, filled)
_DAMAGE = (try_mutants, try_headers, try_special_files, racing)
_NAMES = (try_names, try_shard_names, try_file_names, try_tensor_names, try_pickles)
ACTIONS: dict[str, Callable[..., Callable[[], Any]]] = {
    action.__name__: action
    for action in (snapshots, writers, merged, integrated, restored, joins, merges, *_LOOKING, *_DAMAGE, *_NAMES)
}


# The server


def child(request: dict[str, Any], ready: int) -> None:
    """Prepare, say so, wait for the gate if there is one, and do it."""
    outcome: dict[str, Any] = {}
    # what libraries print is no answer
    os.dup2(2, 1)
    try:
        os.umask(request.get("umask", 0o022))
        if request.get("user") is not None:
            os.setgid(request["user"])
            os.setuid(request["user"])
        go = ACTIONS[request["action"]](**request["arguments"])
        os.write(ready, b"!")
        os.close(ready)
        if request.get("gate"):
            gate = os.open(request["gate"], os.O_RDONLY)
            os.read(gate, 1)
            os.close(gate)
        outcome = {"result": go()}
    except BaseException as error:
        outcome = {"error": type(error).__name__, "message": str(error), "is_ours": isinstance(error, RamTrlError)}
    SHARED.finish(outcome)
    os._exit(0)


def serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        for job in [request["arguments"], *request["arguments"].get("jobs", [])]:
            if job.get("via", "checkpoint") != "checkpoint":
                trained_model(job["model"], job["base"], job.get("adapter") if job["via"] == "live lora" else None)
        # a thread would not be in the children, but what it had locked would be; those that loaded a model end soon
        for _ in range(1000):
            if len(os.listdir("/proc/self/task")) == 1:
                break
            time.sleep(0.01)
        SHARED.clear()
        ready, is_ready = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ready)
            child(request, is_ready)
        os.close(is_ready)
        os.read(ready, 1)
        print(json.dumps({"pid": pid}), flush=True)
        delay = request.get("kill_after")
        if delay is not None:
            time.sleep(delay)
            if request.get("shutdown"):
                shut_down(request["shutdown"])
            os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(ready)
        answer = {"status": status, "acknowledged": SHARED.acknowledged(), **SHARED.outcome()}
        print(json.dumps(answer), flush=True)


def shut_down(mount: str) -> None:
    """The power of an ext4 file system fails: what is not on its disk is lost."""
    descriptor = os.open(mount, os.O_RDONLY)
    fcntl.ioctl(descriptor, _EXT4_IOC_SHUTDOWN, (_NO_LOG_FLUSH).to_bytes(4, "little"))
    os.close(descriptor)


if __name__ == "__main__":
    torch.set_num_threads(1)
    answers = os.dup(1)
    # what is imported on the way would be imported by every child, and says so
    os.dup2(2, 1)
    with contextlib.suppress(ImportError):
        importlib.import_module("deepspeed")
    os.dup2(answers, 1)
    # it would start a thread
    tqdm.monitor_interval = 0
    serve()
    # to take torch down takes seconds
    os._exit(0)
