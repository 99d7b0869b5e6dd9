"""Floor 2': the processes of a run. The only place that knows ranks.

The rule of every collective here: all ranks call it, whatever happened to one of them, and all learn the same outcome.
A rank that failed keeps taking part until [`World.agree`], where everyone stops.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import DistributedError, RamTrlError


__all__ = ["SINGLE", "World", "current_world", "full_parameter", "is_sharded", "start_world"]

T = TypeVar("T")


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
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank, by rank. Values travel as Python objects: keep them small."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
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
    """The process group that is running, if there is one."""
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    return SINGLE


def start_world(cpu: bool = False) -> World:
    """Start or join the process group that a launcher prepared.

    Args:
        cpu (`bool`, *optional*, defaults to `False`):
            Compute on the CPU even if there is a GPU.

    Raises:
        DistributedError: if the environment promises more processes than came together.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched == 1:
        use_gpu = torch.cuda.is_available() and not cpu
        return World(device=torch.device("cuda", 0) if use_gpu else torch.device("cpu"))
    # imported here: one process starts without accelerate
    from accelerate import PartialState

    state = PartialState(cpu=cpu)
    if state.num_processes != launched:
        raise DistributedError(
            f"WORLD_SIZE is {launched} but {state.num_processes} process came together: on a CPU use "
            "torchrun --nproc_per_node N with ACCELERATE_USE_CPU=true, or one process"
        )
    return World(state.process_index, state.num_processes, state.device)


def is_sharded(parameter: Tensor) -> bool:
    """Whether a parameter's elements are spread over the ranks (FSDP2's DTensor, DeepSpeed ZeRO-3)."""
    return _is_dtensor(parameter) or hasattr(parameter, "ds_id")


def full_parameter(parameter: Tensor) -> AbstractContextManager[Tensor]:
    """The whole of a parameter while the context lasts, one parameter at a time. All ranks must call it alike."""
    if _is_dtensor(parameter):
        return nullcontext(parameter.detach().full_tensor())
    if hasattr(parameter, "ds_id"):
        return _gathered_by_deepspeed(parameter)
    return nullcontext(parameter.detach())


def _is_dtensor(parameter: Tensor) -> bool:
    if not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)


class _gathered_by_deepspeed:
    def __init__(self, parameter: Tensor):
        import deepspeed

        self._parameter = parameter
        self._gathered = deepspeed.zero.GatheredParameters([parameter])

    def __enter__(self) -> Tensor:
        self._gathered.__enter__()
        return self._parameter.detach()

    def __exit__(self, *details) -> None:
        self._gathered.__exit__(*details)


def _describe(error: BaseException | None) -> tuple[type[RamTrlError], str] | None:
    if error is None:
        return None
    if isinstance(error, RamTrlError):
        return type(error), str(error)
    return DistributedError, f"{type(error).__name__}: {error}"
