"""Floor 2': the processes of a run. The only place that knows ranks.

The rule of every collective here: all ranks call it, whatever happened to one of them, and all learn the same outcome.
A rank that failed keeps taking part until [`World.agree`], where everyone stops.
"""

import atexit
import functools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from .errors import DistributedError, RamTrlError


__all__ = [
    "SINGLE",
    "World",
    "all_cores",
    "current_world",
    "leave_world",
    "shared_cores",
    "start_world",
]

T = TypeVar("T")

# A launcher starts its processes together; how much later one may be than another, in seconds. One that died is
# waited for as long.
JOIN_SECONDS = 40
# Of a run that has begun; torch's own patience.
_MEET_SECONDS = 1800
# Set by torchrun and by accelerate launch, also for one process.
_LAUNCHED = ("LOCAL_WORLD_SIZE", "ACCELERATE_MIXED_PRECISION")
# Set by mpirun, which sets no WORLD_SIZE.
_MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


@dataclass(frozen=True, slots=True)
class World:
    """The processes that work together, and this one's place among them.

    Args:
        rank (`int`, *optional*, defaults to `0`):
            Number of this process.
        size (`int`, *optional*, defaults to `1`):
            Number of processes. With 1, every collective returns at once.
        device (`torch.device`, *optional*, defaults to the CPU):
            Device that this process computes on.
        group (`ProcessGroup`, *optional*):
            Group that the processes talk through; the default one if unset.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: Any = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank, by rank. Values travel as Python objects: keep them small."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def sum_counts(self, counts: Sequence[int]) -> list[int]:
        """Element-wise sum of integers over the ranks, exact."""
        return [sum(column) for column in zip(*self.gather(list(counts)), strict=True)]

    def agree(self, error: BaseException | None) -> None:
        """Raise on all ranks if one of them failed.

        Raises:
            RamTrlError: the failed rank's own error there; an error of the same class, naming the rank, elsewhere.
        """
        failures = [(rank, failure) for rank, failure in enumerate(self.gather(_describe(error))) if failure]
        if error is not None:
            raise error
        if failures:
            rank, (error_type, message) = failures[0]
            raise error_type(f"{message} (rank {rank})")

    def run(self, action: Callable[[], T]) -> T:
        """Run an action on every rank, and raise on all of them if it failed on one."""
        result, error = None, None
        try:
            result = action()
        except Exception as caught:
            error = caught
        self.agree(error)
        return result

    def run_on_main(self, action: Callable[[], T]) -> T:
        """Run an action on rank 0 alone; all ranks get its result or its error."""
        result = self.run(lambda: action() if self.is_main else None)
        return self.gather(result)[0]


SINGLE = World()


def current_world() -> World:
    """The processes of the run, if there are several. All of them call it."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return World(dist.get_rank(), dist.get_world_size(), group=_own_group(dist.group.WORLD, _MEET_SECONDS))
    return SINGLE


@functools.lru_cache(maxsize=1)
def _own_group(processes: Any, meet_seconds: float) -> Any:
    """The processes of a group once more, talking through gloo and with patience, whatever the run's backend is.

    One process may work long before the others hear of it; the run's own group would give up on it. To meet it has to
    be quick, because a process that died before it came is not noticed.
    """
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=meet_seconds))
    # torch has no other way to do this to one group
    dist.distributed_c10d._set_pg_timeout(timedelta(days=1), group)
    # Left to the interpreter's end, gloo's threads can abort the process.
    atexit.register(_leave, group)
    return group


def _leave(group: Any) -> None:
    # it is gone if the run has ended all of its groups
    with suppress(ValueError, AssertionError):
        dist.destroy_process_group(group)


def start_world(cpu: bool = False) -> World:
    """Join the processes that a launcher (`accelerate launch`, `torchrun`) started.

    They talk through gloo, whatever device they compute on: what they exchange are small Python objects.

    Args:
        cpu (`bool`, *optional*, defaults to `False`):
            Compute on the CPU even if there is a GPU.

    Raises:
        DistributedError: if the environment promises other processes and they do not come.
    """
    cpu = cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on")
    size = _launched("WORLD_SIZE", 1)
    torch.set_num_threads(_num_threads(_launched("LOCAL_WORLD_SIZE", 1)))
    for variable in _MPI_SIZES:
        if size == 1 and _launched(variable, 1) > 1:
            raise DistributedError(
                f"{variable} is {os.environ[variable]}, but mpirun starts processes that do not know each other: "
                "start them with torchrun --nproc_per_node N, or merge in one process"
            )
    if size == 1:
        return World(device=_device(0, cpu))
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise DistributedError(
            f"WORLD_SIZE is {size} but {missing[0]} is not set, so no launcher started these processes: "
            "use torchrun --nproc_per_node N or accelerate launch, or unset WORLD_SIZE"
        )
    rank = _launched("RANK", 0)
    try:
        group = _within(JOIN_SECONDS, lambda: _join(rank, size))
    except (RuntimeError, ValueError, OSError) as error:
        raise DistributedError(
            f"WORLD_SIZE is {size}, but that many processes did not come together within {JOIN_SECONDS} seconds: "
            "start all of them with torchrun or accelerate launch, or unset WORLD_SIZE"
        ) from error
    return World(rank, size, _device(_launched("LOCAL_RANK", rank), cpu), group)


def _join(rank: int, size: int) -> Any:
    """Meet the other processes; the group that they talk through."""
    if rank > 0:
        _await_main(os.environ["MASTER_ADDR"], _launched("MASTER_PORT", 0))
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=JOIN_SECONDS))
    # Left to the interpreter's end, gloo's threads can abort the process.
    atexit.register(dist.destroy_process_group)
    return _own_group(dist.group.WORLD, JOIN_SECONDS)


def _within(seconds: float, action: Callable[[], T]) -> T:
    """What an action gives, unless it takes too long; then it is left to itself.

    torch's timeouts are for a step each, and for the answer of a first process that took the connection and died, or
    whose machine is gone, it has none.

    Raises:
        TimeoutError: if it takes too long.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def act() -> None:
        try:
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    for error in errors:
        raise error
    if not results:
        raise TimeoutError(f"no end after {seconds} seconds")
    return results[0]


def _await_main(address: str, port: int) -> None:
    """Wait until there is somebody at the address of the first process.

    torch would try in ever longer intervals, and say minutes later that nobody is there.
    """
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            socket.create_connection((address, port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def leave_world() -> NoReturn:
    """End the process, with exit code 0: everything is written, and nothing is left to be taken down with care.

    In its own time the interpreter takes half a second to take torch down, and threads of gloo abort a process of
    several now and then (2 of 44 launches of three processes): the launcher reports a failure of work that is done.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def all_cores() -> Iterator[None]:
    """While other processes of the run wait for this one, let it compute with all the cores that it may use."""
    with _threads(_num_threads(1)):
        yield


@contextmanager
def shared_cores() -> Iterator[None]:
    """While all processes of the run work, let each compute with its share of the cores."""
    with _threads(_num_threads(_launched("LOCAL_WORLD_SIZE", 1))):
        yield


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _num_threads(processes: int) -> int:
    """Threads for each of some processes on this machine. Launchers set one, unless the user asked for more."""
    if os.environ.get("OMP_NUM_THREADS") != "1" or not any(name in os.environ for name in _LAUNCHED):
        return torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, processes))


def _launched(variable: str, default: int) -> int:
    """A number that a launcher left in the environment."""
    text = os.environ.get(variable, "").strip() or str(default)
    if not text.isdecimal():
        raise DistributedError(f"the environment has {variable}={text!r}, which is not a number")
    return int(text)


def _device(local_rank: int, cpu: bool) -> torch.device:
    if cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def _describe(error: BaseException | None) -> tuple[type[RamTrlError], str] | None:
    if error is None:
        return None
    if isinstance(error, RamTrlError):
        return type(error), str(error)
    return DistributedError, f"{type(error).__name__}: {error}"
