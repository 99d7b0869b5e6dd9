"""Floor 2': parameters whose elements are spread over the ranks, seen whole or from end to end.

FSDP2 gives each rank some rows of a parameter (a DTensor), DeepSpeed ZeRO-3 a part of the flattened parameter.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .distributed import World


__all__ = ["full_parameter", "is_sharded", "reserve_parameter", "stream_parameter"]


def is_sharded(parameter: Tensor) -> bool:
    """Whether a parameter's elements are spread over the ranks (FSDP2's DTensor, DeepSpeed ZeRO-3)."""
    return _is_dtensor(parameter) or _is_partitioned(parameter)


def full_parameter(parameter: Tensor) -> AbstractContextManager[Tensor]:
    """The whole of a parameter while the context lasts, one parameter at a time. All ranks must call it alike."""
    if _is_dtensor(parameter):
        return nullcontext(parameter.detach().full_tensor())
    if _is_partitioned(parameter):
        return _gathered_by_deepspeed(parameter)
    return nullcontext(parameter.detach())


def reserve_parameter(parameter: Tensor) -> None:
    """Find out before the ranks gather a parameter whether this one has the memory: in the midst others would wait."""
    shape = parameter.ds_shape if _is_partitioned(parameter) else parameter.shape
    torch.empty(shape, dtype=parameter.dtype, device=parameter.device)


def stream_parameter(parameter: Tensor, numel: int, world: World) -> Iterator[Tensor] | None:
    """A sharded parameter from end to end, flattened, a few elements at a time, where no rank needs the whole.

    All ranks call it alike and exhaust what they get.

    Args:
        parameter (`Tensor`):
            The parameter.
        numel (`int`):
            Elements of a piece.
        world ([`~ram_trl.distributed.World`]):
            The processes of the run.

    Returns:
        `Iterator[Tensor]`: pieces, complete on rank 0, each valid until the next; `None` if the whole is needed.

    Raises:
        RamTrlError: on all ranks.
    """
    if not is_sharded(parameter):
        return None
    part = world.run(lambda: _own_part(parameter, numel))
    held = world.gather(part and part.local.numel())
    if part is None or None in held:
        return None
    ranks = dist.get_process_group_ranks(part.group)
    ends = list(accumulate((held[rank] for rank in ranks), initial=0))
    if ends[-1] != part.total:
        return None
    # Rows may be there several times (HSDP): those of rank 0's group are taken.
    return _stream(part, ends, ranks) if 0 in ranks else iter(())


@dataclass(frozen=True, slots=True)
class _Part:
    """The range of a flattened parameter that this rank holds.

    Args:
        group (`ProcessGroup`):
            The ranks over which the parameter is spread, in the order of their parts.
        local (`Tensor`):
            The range, flat.
        total (`int`):
            Elements of the parameter.
        buffer (`Tensor`):
            Memory for a piece, where the group can reach it.
    """

    group: Any
    local: Tensor
    total: int
    buffer: Tensor


def _own_part(parameter: Tensor, numel: int) -> _Part | None:
    """`None` if the ranks do not hold ranges."""
    found = _rows(parameter) if _is_dtensor(parameter) else _partition(parameter)
    if found is None:
        return None
    group, local, total = found
    # weights that were offloaded to the CPU are sent through the GPU
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else local.device
    return _Part(group, local, total, torch.empty(min(numel, total), dtype=local.dtype, device=device))


def _rows(parameter: Tensor) -> tuple[Any, Tensor, int] | None:
    from torch.distributed.tensor import Shard

    mesh = parameter.device_mesh
    spread = [
        (dim, placement)
        for dim, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    ]
    local = parameter.detach().to_local()
    if len(spread) != 1 or type(spread[0][1]) is not Shard or spread[0][1].dim != 0 or not local.is_contiguous():
        return None
    return mesh.get_group(spread[0][0]), local.view(-1), parameter.numel()


def _partition(parameter: Tensor) -> tuple[Any, Tensor, int] | None:
    from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus

    held = parameter.ds_tensor
    # it may be on a disk (NVMe), or quantised
    if held.status is not PartitionedParamStatus.AVAILABLE or held.dtype != parameter.dtype:
        return None
    begin = parameter.ds_zero_partition_rank * held.ds_numel
    # the last ones are padded
    length = max(0, min(held.ds_numel, parameter.ds_numel - begin))
    return parameter.ds_process_group, held.detach().view(-1)[:length], parameter.ds_numel


def _stream(part: _Part, ends: list[int], ranks: list[int]) -> Iterator[Tensor]:
    own = dist.get_rank()
    for start in range(0, part.total, max(1, len(part.buffer))):
        piece = part.buffer[: part.total - start]
        for rank, (begin, end) in zip(ranks, pairwise(ends), strict=True):
            low, high = max(begin, start), min(end, start + len(piece))
            if low < high:
                sent = piece[low - start : high - start]
                if rank == own:
                    sent.copy_(part.local[low - begin : high - begin])
                # to all: for a message from one to another NCCL would have to make a communicator of each pair
                dist.broadcast(sent, rank, group=part.group)
        yield piece


def _is_dtensor(parameter: Tensor) -> bool:
    if not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)


def _is_partitioned(parameter: Tensor) -> bool:
    return hasattr(parameter, "ds_id")


@contextmanager
def _gathered_by_deepspeed(parameter: Tensor) -> Iterator[Tensor]:
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        yield parameter.detach()
