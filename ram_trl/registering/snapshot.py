"""The snapshot of a full fine-tune: what changed against the base on disk, written as it is found.

Tensors arrive one at a time, from a live model or from a checkpoint. Every thread has one piece of the base and of the
agent in its hands, nothing more.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..arithmetic.codec import TILE_NUMEL, EncodedTile, codec_dtype, encode_tile, is_mergeable
from ..arithmetic.defaults import DEFAULT_EPSILON
from ..arithmetic.select import select
from ..errors import ConfigError, IncompatibleAgentError, UnsupportedModelError
from ..storage.checkpoint import Checkpoint
from ..storage.manifest import SnapshotRecord, TensorRecord
from ..storage.registry import DELTA, TENSORS, write_records
from ..storage.stream_writer import StreamWriter
from ..storage.tensor_file import DTYPE_NAMES, DTYPES, PIECE_NUMEL, TensorInfo, digest_piece, join_digests, num_pieces
from ..task_vector import DELTA_PREFIX, ENDS_PREFIX
from ..threads import Scratch, Workers
from .checks import COMPUTED_BUFFERS, check_tensors, diverged


__all__ = ["AgentTensor", "FullSnapshot", "base_records", "total_parameters"]

logger = logging.getLogger(__name__)


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
        is_stream (`bool`, *optional*, defaults to `False`):
            Whether elements come only once, from first to last, and to the thread that adds the tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], Tensor]
    is_stream: bool = False

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

    def __init__(
        self, staged: Path, base: Checkpoint, dtype: torch.dtype | None = None, epsilon: float = DEFAULT_EPSILON
    ):
        if dtype not in (None, torch.float32) and dtype not in {info.dtype for info in base.tensors.values()}:
            raise ConfigError(
                f"snapshot_dtype is {dtype}, but no tensor of the base {base.name} is: use auto or float32"
            )
        self._staged, self._base, self._dtype, self._epsilon = staged, base, dtype, float(epsilon)
        names = [prefix + name for name in base.tensors for prefix in (DELTA_PREFIX, ENDS_PREFIX)]
        self._writer = StreamWriter(staged / DELTA, names, {"format": "ram_trl.delta"})
        self._records: dict[str, TensorRecord] = {}
        self._agent_digests: dict[str, str] = {}
        self._extra_digests: dict[str, str] = {}
        self._stored_numel: dict[torch.dtype, int] = {}
        self._changed = self._changed_by_training = 0
        self._update = self._rounding = 0.0
        self._is_rounded = self._is_cut = False
        self._scratch, self._workers = Scratch(), Workers()

    def __enter__(self) -> "FullSnapshot":
        self._workers.__enter__()
        return self

    def __exit__(self, *_) -> None:
        self._workers.__exit__()
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
            if not tensor.name.endswith(COMPUTED_BUFFERS):
                self._extra_digests[tensor.name] = _digest(tensor)
            return
        info = self._base.tensors[tensor.name]
        if info.name in self._base.tied:
            self._extra_digests[info.name] = _digest(tensor)
        elif codec_dtype(info.dtype, tensor.dtype) is None and tensor.dtype != info.dtype:
            raise UnsupportedModelError(
                f"tensor {info.name!r} of the agent is {tensor.dtype}: save the agent in bfloat16, float16 or float32"
            )
        elif info.numel == 0:
            self._records.update(base_records(self._base, [info.name]))
        elif not is_mergeable(info.dtype):
            self._records.update(base_records(self._base, [info.name]))
            if _digest(tensor) != self._records[info.name].base:
                raise UnsupportedModelError(f"tensor {info.name!r} changed, but {info.dtype} cannot be merged")
        else:
            self._write(tensor)

    def finish(self, is_whole: bool = True) -> tuple[dict[str, TensorRecord], SnapshotRecord]:
        """Close the files and describe the snapshot.

        Args:
            is_whole (`bool`, *optional*, defaults to `True`):
                Whether all of the agent was added, so that it is to be said if a tensor of the base was not.

        Returns:
            `tuple[dict[str, TensorRecord], SnapshotRecord]`: the records of the base's tensors, and of the snapshot.

        Raises:
            IncompatibleAgentError: if the agent untied the output head.
        """
        self.flush()
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
        if missing and is_whole:
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

    def flush(self) -> None:
        """Finish the tensors that were added, so that their memory can be given back."""
        self._workers.drain()

    def _write(self, tensor: AgentTensor) -> None:
        """Have the tensor encoded; its pieces are written in their order, while others are encoded."""
        written = _WrittenTensor(self._base.tensors[tensor.name])
        for start in range(0, written.info.numel, PIECE_NUMEL):
            read = partial(tensor.read, start, min(start + PIECE_NUMEL, written.info.numel))
            if tensor.is_stream:
                read = read().detach
            self._workers.put(partial(self._encode, tensor.name, start, read), partial(self._append, written))

    def _append(self, written: "_WrittenTensor", piece: "_EncodedPiece") -> None:
        if not written.pieces:
            self._writer.begin(DELTA_PREFIX + written.info.name, torch.uint8)
        for tile in piece.tiles:
            for part in (tile.large.mask, tile.large.codes, tile.small.mask, tile.small.codes):
                self._writer.append(part)
                written.ends.append(len(part) + (written.ends[-1] if written.ends else 0))
        self._count(piece)
        # what was written is not needed any more
        piece.tiles.clear()
        written.pieces.append(piece)
        if len(written.pieces) == num_pieces(written.info.numel):
            self._end(written)

    def _end(self, written: "_WrittenTensor") -> None:
        info, pieces = written.info, written.pieces
        record = TensorRecord(
            dtype=DTYPE_NAMES[info.dtype],
            shape=list(info.shape),
            base=join_digests(piece.base_digest for piece in pieces),
        )
        if written.ends and written.ends[-1]:
            self._writer.end()
            self._writer.write(ENDS_PREFIX + info.name, torch.tensor(written.ends, dtype=torch.int64))
            record.stored = DTYPE_NAMES[pieces[0].dtype]
            record.agent = join_digests(piece.stored_digest for piece in pieces)
        else:
            self._writer.cancel()
        self._records[info.name] = record
        self._agent_digests[info.name] = join_digests(piece.trained_digest for piece in pieces)

    def _encode(self, name: str, start: int, read: Callable[[], Tensor]) -> "_EncodedPiece":
        """One piece: rounded, or without changes of at most epsilon, if that was asked for; then encoded."""
        info = self._base.tensors[name]
        trained = read()
        into = self._scratch.take(len(trained) * info.dtype.itemsize)
        base = self._base.read(info.name, start, start + len(trained), into)
        rounded = trained.to(self._dtype) if self._dtype in (base.dtype, torch.float32) else trained
        stored = rounded.to(codec_dtype(base.dtype, rounded.dtype))
        widened, is_cut = base.to(stored.dtype), False
        if stored.dtype == torch.float32 and self._epsilon > 0:
            small = (stored - widened).abs() <= self._epsilon
            is_cut = bool((small & (stored != widened)).any())
            stored = select(small, widened, stored)
        tiles = [encode_tile(*pair) for pair in zip(widened.split(TILE_NUMEL), stored.split(TILE_NUMEL), strict=True)]
        if not all(tile.is_finite for tile in tiles):
            raise diverged(info.name)
        trained_digest = digest_piece(trained)
        piece = _EncodedPiece(
            base_digest=digest_piece(base),
            trained_digest=trained_digest,
            stored_digest=trained_digest if stored is trained else digest_piece(stored),
            dtype=stored.dtype,
            tiles=tiles,
            is_cut=is_cut,
            numel=len(trained),
        )
        if rounded.dtype.itemsize < trained.dtype.itemsize:
            update = trained - base.float()
            piece.changed_by_training = int(torch.count_nonzero(update))
            piece.update = float(update.abs_().sum(dtype=torch.float64))
            piece.rounding = float((trained - stored.float()).abs_().sum(dtype=torch.float64))
        return piece

    def _count(self, piece: "_EncodedPiece") -> None:
        self._stored_numel[piece.dtype] = self._stored_numel.get(piece.dtype, 0) + piece.numel
        self._changed += sum(tile.changed for tile in piece.tiles)
        self._is_cut |= piece.is_cut
        if piece.update is not None:
            self._is_rounded = True
            self._changed_by_training += piece.changed_by_training
            self._update += piece.update
            self._rounding += piece.rounding


@dataclass(slots=True)
class _WrittenTensor:
    """A tensor on its way into the file: the pieces that are written, and where each part of each tile ends."""

    info: TensorInfo
    pieces: list["_EncodedPiece"] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class _EncodedPiece:
    """What is kept of a piece of an agent, and digests of it and of the base; the last three if it was rounded."""

    base_digest: bytes
    trained_digest: bytes
    stored_digest: bytes
    dtype: torch.dtype
    tiles: list[EncodedTile]
    is_cut: bool
    numel: int
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


def _digest(tensor: AgentTensor) -> str:
    numel = torch.Size(tensor.shape).numel()
    starts = range(0, numel, PIECE_NUMEL)
    return join_digests(digest_piece(tensor.read(at, min(at + PIECE_NUMEL, numel))) for at in starts)
