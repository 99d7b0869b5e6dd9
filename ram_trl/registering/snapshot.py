"""The snapshot of a full fine-tune: what changed against the base on disk, written as it is found.

Tensors arrive one at a time, from a live model or from a checkpoint; a tile of the base and a tile of the agent are in
memory at once, nothing more.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from ..arithmetic.codec import codec_dtype, encode_frame, is_mergeable
from ..arithmetic.select import select
from ..errors import ConfigError, IncompatibleAgentError, NonFiniteError, UnsupportedModelError
from ..storage.checkpoint import OUTPUT_HEAD, Checkpoint
from ..storage.manifest import SnapshotRecord, TensorRecord
from ..storage.registry import DELTA, TENSORS, write_records
from ..storage.tensor_file import DTYPE_NAMES, DTYPES, StreamWriter, tensor_bytes
from ..task_vector import CODES, FRAMES, TILE_NUMEL
from ..threads import in_threads


__all__ = ["AgentTensor", "FullSnapshot", "base_records", "check_finite", "check_tensors", "total_parameters"]

logger = logging.getLogger(__name__)

# Buffers that old checkpoints hold and models compute anew.
_COMPUTED_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


@dataclass(frozen=True, slots=True)
class AgentTensor:
    """One tensor of an agent, under the name that the base's files use.

    Args:
        name (`str`):
            Name.
        dtype (`torch.dtype`):
            Dtype.
        shape (`tuple[int, ...]`):
            Shape.
        read (`Callable[[int, int], Tensor]`):
            Gives elements `start ... stop - 1` of the flattened tensor, on the CPU.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], Tensor]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "AgentTensor":
        """From a whole tensor in memory."""
        flat = tensor.detach().cpu().reshape(-1)
        return cls(name, tensor.dtype, tuple(tensor.shape), lambda start, stop: flat[start:stop])


class FullSnapshot:
    """Writes the snapshot of a full fine-tune into a staged directory, tensor by tensor.

    Args:
        staged (`Path`):
            Directory to write in.
        base ([`~ram_trl.storage.checkpoint.Checkpoint`]):
            Base model.
        dtype (`torch.dtype`, *optional*):
            A 16-bit dtype: tensors of which the base has this dtype are rounded to it, because that is what a run
            under autocast and deployment execute. float32: all are stored in it. If unset, each is stored in its own.
        epsilon (`float`, *optional*, defaults to `1e-5`):
            Where values are stored in float32, changes of at most this size are not stored. 16-bit values over a base
            of the same dtype are always stored bit for bit.

    Raises:
        ConfigError: if no tensor of the base has the 16-bit dtype.
    """

    def __init__(self, staged: Path, base: Checkpoint, dtype: torch.dtype | None = None, epsilon: float = 1e-5):
        if dtype not in (None, torch.float32) and dtype not in {info.dtype for info in base.tensors.values()}:
            raise ConfigError(
                f"snapshot_dtype is {dtype}, but no tensor of the base {base.name} is: use auto or float32"
            )
        self._staged, self._base, self._dtype, self._epsilon = staged, base, dtype, epsilon
        names = [prefix + name for name in base.tensors for prefix in (CODES, FRAMES)]
        self._writer = StreamWriter(staged / DELTA, names, {"format": "ram_trl.delta"})
        self._records: dict[str, TensorRecord] = {}
        self._agent_digests: dict[str, str] = {}
        self._extra_digests: dict[str, str] = {}
        self._stored_numel: dict[torch.dtype, int] = {}
        self._changed = self._changed_by_training = 0
        self._update = self._rounding = 0.0
        self._is_rounded = self._is_cut = False

    def __enter__(self) -> "FullSnapshot":
        return self

    def __exit__(self, *_) -> None:
        self._writer.abort()

    def add(self, tensor: AgentTensor) -> None:
        """Compare one tensor with the base and write what changed.

        Raises:
            IncompatibleAgentError: if its shape is not the base's.
            NonFiniteError: if it holds NaN or infinity.
            UnsupportedModelError: if it changed and is of a dtype that cannot be merged.
        """
        check_tensors({tensor.name: tensor.shape}, self._base)
        if tensor.name not in self._base.tensors:
            if not tensor.name.endswith(_COMPUTED_BUFFERS):
                self._extra_digests[tensor.name] = _digest(tensor)
            return
        info = self._base.tensors[tensor.name]
        if info.name in self._base.tied:
            self._extra_digests[info.name] = _digest(tensor)
        elif codec_dtype(info.dtype, tensor.dtype) is None and tensor.dtype != info.dtype:
            raise UnsupportedModelError(
                f"tensor {info.name!r} of the agent is {tensor.dtype}: save the agent in bfloat16, float16 or float32"
            )
        elif not is_mergeable(info.dtype):
            self._records.update(base_records(self._base, [info.name]))
            if _digest(tensor) != self._records[info.name].base:
                raise UnsupportedModelError(f"tensor {info.name!r} changed, but {info.dtype} cannot be merged")
        else:
            self._write(tensor)

    def finish(self) -> tuple[dict[str, TensorRecord], SnapshotRecord]:
        """Close the files and describe the snapshot.

        Returns:
            `tuple[dict[str, TensorRecord], SnapshotRecord]`: the records of the base's tensors, and of the snapshot.

        Raises:
            IncompatibleAgentError: if the agent untied the output head.
        """
        for name, digest in self._extra_digests.items():
            # A tied head that was saved beside the embedding says nothing new.
            tied_to = self._base.tied.get(name)
            originals = [self._agent_digests.get(tied_to)] if tied_to else self._agent_digests.values()
            if digest not in originals:
                raise IncompatibleAgentError(
                    f"the agent has its own {name!r}, which the base {self._base.name} ties to its embeddings: untie "
                    "the base, save it, and train from that"
                )
        missing = [name for name in self._base.tensors if name not in self._records and name not in self._base.tied]
        if missing:
            logger.warning("%d base tensors are not in the agent and count as unchanged: %s", len(missing), missing[0])
        self._writer.close()
        records = {**base_records(self._base, [*missing, *self._base.tied]), **self._records}
        write_records(self._staged / TENSORS, records)
        dtype = max(self._stored_numel, key=self._stored_numel.get, default=self._dtype or torch.float32)
        return records, SnapshotRecord(
            dtype=str(dtype).removeprefix("torch."),
            epsilon=self._epsilon if self._is_cut else 0.0,
            changed=self._changed,
            changed_by_training=self._changed_by_training if self._is_rounded else None,
            hidden_update=self._rounding / self._update if self._is_rounded and self._update else None,
        )

    def _write(self, tensor: AgentTensor) -> None:
        info = self._base.tensors[tensor.name]
        base_hasher, trained_hasher, stored_hasher = blake3(), blake3(), blake3()
        ends, position = [], 0
        self._writer.begin(CODES + info.name, torch.uint8)
        starts = range(0, info.numel, TILE_NUMEL)
        for _, tile in in_threads(lambda start: self._encode(tensor, start), starts):
            base_hasher.update(tensor_bytes(tile.base))
            trained_hasher.update(tensor_bytes(tile.trained))
            stored_hasher.update(tensor_bytes(tile.stored))
            self._writer.append(tile.frame)
            position += len(tile.frame)
            ends.append(position)
            self._count(tile)
        record = TensorRecord(dtype=DTYPE_NAMES[info.dtype], shape=list(info.shape), base=base_hasher.hexdigest())
        if position:
            self._writer.end()
            self._writer.write(FRAMES + info.name, torch.tensor(ends, dtype=torch.int64))
            record.stored, record.agent = DTYPE_NAMES[tile.stored.dtype], stored_hasher.hexdigest()
        else:
            self._writer.cancel()
        self._records[info.name] = record
        self._agent_digests[info.name] = trained_hasher.hexdigest()

    def _encode(self, tensor: AgentTensor, start: int) -> "_EncodedTile":
        """One tile: rounded, or without changes of at most epsilon, if that was asked for; then encoded."""
        info = self._base.tensors[tensor.name]
        stop = min(start + TILE_NUMEL, info.numel)
        base, trained = self._base.read(info.name, start, stop), tensor.read(start, stop)
        check_finite(info.name, trained)
        rounded = trained.to(self._dtype) if self._dtype in (base.dtype, torch.float32) else trained
        stored = rounded.to(codec_dtype(base.dtype, rounded.dtype))
        is_cut = False
        if stored.dtype == torch.float32 and self._epsilon > 0:
            small = (stored - base.float()).abs() <= self._epsilon
            is_cut = bool((small & (stored != base)).any())
            stored = select(small, base.float(), stored)
        widened = base.to(stored.dtype)
        frame = encode_frame(widened, stored)
        changed = int(torch.count_nonzero(widened != stored)) if frame else 0
        tile = _EncodedTile(base, trained, stored, frame, changed, is_cut)
        if rounded.dtype.itemsize < trained.dtype.itemsize:
            update = trained.double() - base.double()
            tile.changed_by_training = int(torch.count_nonzero(update))
            tile.update = float(update.abs().sum())
            tile.rounding = float((trained.double() - stored.double()).abs().sum())
        return tile

    def _count(self, tile: "_EncodedTile") -> None:
        self._stored_numel[tile.stored.dtype] = self._stored_numel.get(tile.stored.dtype, 0) + tile.stored.numel()
        self._changed += tile.changed
        self._is_cut |= tile.is_cut
        if tile.update is not None:
            self._is_rounded = True
            self._changed_by_training += tile.changed_by_training
            self._update += tile.update
            self._rounding += tile.rounding


@dataclass(slots=True)
class _EncodedTile:
    """A tile of the base, of the agent, and what is kept of it; the last three are set if it was rounded."""

    base: Tensor
    trained: Tensor
    stored: Tensor
    frame: bytes
    changed: int
    is_cut: bool
    changed_by_training: int = 0
    update: float | None = None
    rounding: float = 0.0


def base_records(base: Checkpoint, names: Iterable[str]) -> dict[str, TensorRecord]:
    """Records of some of the base's tensors, read and digested now."""
    records = {}
    for name in names:
        info = base.tensors[name]
        records[name] = TensorRecord(
            dtype=DTYPE_NAMES[info.dtype],
            shape=list(info.shape),
            base=base.digest(name),
            tied_to=base.tied.get(name),
        )
    return records


def total_parameters(records: dict[str, TensorRecord]) -> int:
    """Number of parameters that can be merged (bfloat16, float16, float32), tied ones once."""
    return sum(
        record.numel for record in records.values() if record.tied_to is None and is_mergeable(DTYPES[record.dtype])
    )


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuse NaN and infinity.

    Raises:
        NonFiniteError: naming the tensor.
    """
    # The largest magnitude is NaN or infinite if any element is: one pass.
    if tensor.numel() and not tensor.abs().amax().isfinite():
        raise NonFiniteError(f"tensor {name!r} of the agent holds NaN or infinity: its training diverged")


def check_tensors(shapes: dict[str, tuple[int, ...]], base: Checkpoint) -> None:
    """Refuse a full fine-tune whose tensors are not the base's.

    Args:
        shapes (`dict[str, tuple[int, ...]]`):
            Shapes of the agent's tensors, by the names that the base's files use.

    Raises:
        IncompatibleAgentError: naming the first that differs.
    """
    for name, shape in shapes.items():
        if name not in base.tensors:
            if (name == OUTPUT_HEAD and base.ties_embeddings) or name.endswith(_COMPUTED_BUFFERS):
                continue
            raise IncompatibleAgentError(f"the agent has tensor {name!r}, which the base {base.name} lacks")
        expected = base.tensors[name].shape
        if tuple(shape) != expected:
            cure = ""
            if shape and expected and tuple(shape[1:]) == expected[1:]:
                cure = ": the vocabulary was resized; resize the base in the same way, save it, and train from that"
            raise IncompatibleAgentError(
                f"tensor {name!r} has shape {list(shape)}, in the base {base.name} it has {list(expected)}{cure}"
            )


def _digest(tensor: AgentTensor) -> str:
    numel = torch.Size(tensor.shape).numel()
    hasher = blake3()
    for start in range(0, numel, TILE_NUMEL):
        hasher.update(tensor_bytes(tensor.read(start, min(start + TILE_NUMEL, numel))))
    return hasher.hexdigest()
