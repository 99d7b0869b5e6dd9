"""A registered agent as a normal model directory: a full fine-tune bit for bit, a LoRA agent merged into its base."""

from functools import partial
from pathlib import Path

import torch

from ..arithmetic.codec import TILE_NUMEL, codec_dtype
from ..errors import CorruptedFileError
from ..progress import Progress
from ..storage.base_model import BaseDigests, open_recorded_base
from ..storage.checkpoint import Checkpoint, CheckpointWriter, TensorWriter, copy_model_files, parse_size, plan_shards
from ..storage.durable import check_output_dir, output_dir_stage
from ..storage.manifest import TensorRecord
from ..storage.registry import AgentRegistry, RegisteredAgent
from ..storage.tensor_file import DTYPES, PIECE_NUMEL, TensorInfo, digest_piece, join_digests, num_pieces
from ..task_vector import TaskVector, open_task_vector
from ..threads import Scratch, Workers


__all__ = ["restore_agent", "restored_dtype", "write_agent"]


def restore_agent(
    registry: AgentRegistry | str,
    agent: str,
    output_dir: str,
    *,
    base_model: str | None = None,
    max_shard_size: str = "5GB",
    progress: Progress | None = None,
) -> RegisteredAgent:
    """Write an agent as a model directory that transformers and vLLM load.

    Args:
        registry ([`AgentRegistry`] or `str`):
            The registry.
        agent (`str`):
            `"math"` (its latest version) or `"math@v2"`.
        output_dir (`str`):
            Directory to create; it must not exist or be empty.
        base_model (`str`, *optional*):
            Where the base model is now, if not where it was.
        max_shard_size (`str`, *optional*, defaults to `"5GB"`):
            Largest size of a weight file.
        progress (`Callable`, *optional*):
            Called with what is being done, the bytes done and the bytes to do.

    Returns:
        [`RegisteredAgent`]: the agent that was restored.

    Raises:
        CorruptedFileError: if what comes out is not what was registered.
    """
    registry = AgentRegistry(registry)
    registered = registry.get(agent)
    check_output_dir(Path(output_dir))
    registry.check_outside(Path(output_dir))
    shard_bytes = parse_size(max_shard_size)
    with output_dir_stage(Path(output_dir)) as staged:
        registered.verify()
        base = open_recorded_base(registered, base_model)
        task_vector = open_task_vector(registered)
        if registered.manifest.kind == "lora":
            # now that it is open: what comes out of a full fine-tune is compared with its record, but not this
            registered.verify()
        records = registered.tensors()
        infos = [
            TensorInfo(info.name, restored_dtype(registered, info, records), info.shape)
            for info in base.tensors.values()
        ]
        writer = CheckpointWriter(staged, plan_shards(infos, shard_bytes))
        writer.create()
        writer.open()
        write_agent(registered, base, task_vector, infos, writer, progress)
        base.check_unchanged()
        task_vector.check_unchanged()
        writer.close()
        task_vector.close()
        copy_model_files(base.path, staged, infos)
    return registered


def write_agent(
    agent: RegisteredAgent,
    base: Checkpoint,
    task_vector: TaskVector,
    infos: list[TensorInfo],
    writer: TensorWriter,
    progress: Progress | None,
) -> None:
    """Write an agent's tensors, checking what is read and what comes out.

    Args:
        agent ([`~ram_trl.storage.registry.RegisteredAgent`]):
            The agent.
        base ([`~ram_trl.storage.checkpoint.Checkpoint`]):
            Its base model.
        task_vector ([`~ram_trl.task_vector.TaskVector`]):
            Its task vector, open.
        infos (`list[TensorInfo]`):
            Tensors to write, with the dtypes to write them in.
        writer ([`~ram_trl.storage.checkpoint.TensorWriter`]):
            Where to write; threads call it.
        progress (`Callable`, *optional*):
            Called with what is being done, the bytes done and the bytes to do.

    Raises:
        BaseModelError: if a tensor of the base is not what was recorded.
        CorruptedFileError: if what comes out is not what was registered.
    """
    done, total = 0, sum(info.nbytes for info in infos)
    with Workers() as workers:
        restored = _Restored(agent, base, task_vector, writer, workers)
        for info in infos:
            restored.write(info)
            done += info.nbytes
            if progress:
                progress("restore", done, total)
        workers.drain()


def restored_dtype(agent: RegisteredAgent, info: TensorInfo, records: dict[str, TensorRecord]) -> torch.dtype:
    """Dtype in which the agent ran: the base's, or wider if it was stored so."""
    if agent.manifest.kind == "lora":
        return info.dtype
    stored = records[records[info.name].tied_to or info.name].stored
    if stored is not None:
        return DTYPES[stored]
    return codec_dtype(info.dtype, getattr(torch, agent.manifest.snapshot.dtype)) or info.dtype


class _Restored:
    """Writes an agent's tensors, checking what it reads and what comes out."""

    def __init__(
        self,
        agent: RegisteredAgent,
        base: Checkpoint,
        task_vector: TaskVector,
        writer: TensorWriter,
        workers: Workers,
    ):
        self._agent, self._base, self._task_vector, self._writer = agent, base, task_vector, writer
        self._records, self._changed_tensors = agent.tensors(), task_vector.changed_tensors
        self._scratch, self._workers = Scratch(), workers

    def write(self, info: TensorInfo) -> None:
        """Write one tensor from the agent's tensor of that name, or from the one that it is tied to."""
        record = self._records[info.name]
        source = record.tied_to or info.name
        checked, stored = BaseDigests(self._base, self._records), []

        def take(digests: tuple[bytes, bytes]) -> None:
            checked.add(source, digests[0])
            stored.append(digests[1])
            if len(stored) == num_pieces(info.numel):
                self._compare(source, join_digests(stored))

        for start in range(0, info.numel, PIECE_NUMEL):
            self._workers.put(partial(self._piece, info, source, start), take)
        if record.tied_to is not None:
            checked.compare(info.name, self._base.digest(info.name))

    def _compare(self, source: str, digest: str) -> None:
        if self._records[source].stored is not None and digest != self._records[source].agent:
            raise CorruptedFileError(
                f"tensor {source!r} of agent {self._agent} does not come back as it was registered"
            )

    def _piece(self, info: TensorInfo, source: str, start: int) -> tuple[bytes, bytes]:
        """Write a piece; the digests of the base's piece, and of the agent's as it was stored."""
        stop = min(start + PIECE_NUMEL, info.numel)
        dtype = self._base.tensors[source].dtype
        base = self._base.read(source, start, stop, self._scratch.take((stop - start) * dtype.itemsize))
        changed, tiles = source in self._changed_tensors, []
        for offset in range(0, stop - start, TILE_NUMEL):
            base_tile = base[offset : offset + TILE_NUMEL]
            tile = self._task_vector.agent_tile(source, start + offset, base_tile) if changed else None
            tiles.append(base_tile if tile is None else tile)
        stored = self._records[source].stored
        piece = torch.cat([tile.to(DTYPES[stored] if stored else dtype) for tile in tiles])
        self._writer.write(info.name, start, piece.to(info.dtype))
        return digest_piece(base), digest_piece(piece)
