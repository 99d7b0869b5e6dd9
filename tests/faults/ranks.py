"""Merges by several processes, of which one is killed or only pretends. `run_forks.py` runs them in children."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ram_trl import distributed
from ram_trl.errors import DistributedError
from ram_trl.merging import merge
from ram_trl.storage import durable
from ram_trl.storage.checkpoint import CheckpointWriter


__all__ = ["FIRSTS", "POINTS", "joins", "merges", "pretend"]

# Where a rank dies: the function that it does not come to call, of what, and for the how manieth time.
POINTS: dict[str, tuple[Any, str, int]] = {
    "joining": (distributed.dist, "init_process_group", 1),
    "joined": (distributed.dist, "new_group", 1),
    "planning": (merge, "plan_merge", 1),
    "verifying": (merge, "_verify", 1),
    "probing": (merge, "probe_tensors", 1),
    "laying out": (CheckpointWriter, "create", 1),
    "opening": (CheckpointWriter, "open", 1),
    "merging": (merge, "merge_tensors", 1),
    "writing": (CheckpointWriter, "write", 1),
    "reporting": (merge, "build_report", 2),
    "finishing": (merge, "_finish", 1),
    "publishing": (durable, "publish", 1),
}
# What the others may come to see of a first process.
FIRSTS = ("is seen and dies", "closes", "is mute", "greets and dies", "greets and is mute", "meets and stops")
# How long the ranks that are left may take to end.
_PATIENCE = 60


def _die_at(owner: Any, name: str, call: int) -> None:
    function, calls = getattr(owner, name), []

    def die(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    setattr(owner, name, die)


def _delay(seconds: float) -> None:
    plan = merge.plan_merge
    merge.plan_merge = lambda *arguments: (time.sleep(seconds), plan(*arguments))[1]


def pretend(listening: socket.socket, way: str) -> None:
    """Be a first process that comes to nothing; one of `FIRSTS`."""
    if way == "meets and stops":
        port = listening.getsockname()[1]
        listening.close()
        distributed.dist.new_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGSTOP)
        _enter(0, 2, port)
        distributed.start_world(cpu=True)
    kept = []
    while True:
        connection, _ = listening.accept()
        if way == "is seen and dies":
            return
        if way == "closes":
            connection.close()
        elif way == "is mute":
            kept.append(connection)
        # torch's greeting; it ends with a number of 4 bytes that is to be said again
        elif len(greeting := connection.recv(10, socket.MSG_WAITALL)) == 10:
            connection.sendall(greeting[6:])
            kept.append(connection)
            if way == "greets and dies":
                return


def joins(join: float):
    """A second process joins each of the first ones that come to nothing, all of them at once.

    Args:
        join (`float`):
            Seconds for which it waits.
    """
    distributed.JOIN_SECONDS = join

    def second(port: int) -> int:
        _enter(1, 2, port)
        try:
            distributed.start_world(cpu=True)
        except DistributedError as error:
            print(error, flush=True)
            return 2
        return 0

    def go() -> dict[str, dict[str, Any]]:
        firsts, seconds = [], {}
        for way in FIRSTS:
            listening = socket.create_server(("127.0.0.1", 0))
            port = listening.getsockname()[1]
            firsts.append(_fork(lambda listening=listening, way=way: pretend(listening, way)))
            listening.close()
            seconds[_fork(lambda port=port: second(port))] = way
        started, ended = time.monotonic(), {}
        while len(ended) < len(FIRSTS) and time.monotonic() < started + _PATIENCE:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in seconds:
                spent = time.monotonic() - started
                ended[seconds[pid]] = {"code": os.waitstatus_to_exitcode(status), "seconds": spent}
            time.sleep(0.005)
        for pid in [*firsts, *seconds]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return ended

    return go


def _fork(action: Callable[[], int | None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(action() or 0)
        finally:
            os._exit(1)
    return pid


def _enter(rank: int, size: int, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def _merge(rank: int, size: int, port: int, registry: str, output_dir: str, dies_at: str | None) -> None:
    _enter(rank, size, port)
    if dies_at is not None:
        _die_at(*POINTS[dies_at])
    merge.merge_agents(registry, output_dir, world=distributed.start_world(cpu=True))


def merges(
    size: int,
    registry: str,
    output_dir: str,
    victim: int = 0,
    point: str | float | None = None,
    slow: float = 0.0,
    join: float | None = None,
):
    """Processes that merge.

    Args:
        size (`int`):
            How many.
        registry (`str`):
            The registry.
        output_dir (`str`):
            Where to merge to.
        victim (`int`, *optional*, defaults to `0`):
            The one that is killed.
        point (`str` or `float`, *optional*):
            Where: a name among `POINTS`, or after how many seconds.
        slow (`float`, *optional*, defaults to `0.0`):
            Seconds by which the last one is later than the others with its plan.
        join (`float`, *optional*):
            Seconds for which they wait for each other at the start.
    """
    distributed.JOIN_SECONDS = join or distributed.JOIN_SECONDS

    def go() -> dict[str, Any]:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        pids, started = [], time.monotonic()
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                try:
                    dies_at = point if isinstance(point, str) and rank == victim else None
                    if slow and rank == size - 1:
                        _delay(slow)
                    _merge(rank, size, port, registry, output_dir, dies_at)
                except BaseException as error:
                    print(f"rank {rank}: {error!r}", flush=True)
                    os._exit(1)
                os._exit(0)
            pids.append(pid)
        if isinstance(point, float):
            time.sleep(point)
            os.kill(pids[victim], signal.SIGKILL)
        codes: dict[int, int] = {}
        ended: dict[int, float] = {}
        deadline = time.monotonic() + _PATIENCE
        while len(codes) < size and time.monotonic() < deadline:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                time.sleep(0.005)
                continue
            codes[pids.index(pid)], ended[pids.index(pid)] = os.waitstatus_to_exitcode(status), time.monotonic()
        hanging = [rank for rank in range(size) if rank not in codes]
        for rank in hanging:
            os.kill(pids[rank], signal.SIGKILL)
            os.waitpid(pids[rank], 0)
        died = ended.get(victim, started)
        return {
            "codes": [codes.get(rank) for rank in range(size)],
            "hanging": hanging,
            "seconds": max(ended.values(), default=started) - died,
            "length": max(ended.values(), default=started) - started,
            "left": sorted(path.name for path in Path(output_dir).parent.iterdir()),
        }

    return go
