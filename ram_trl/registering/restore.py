"""A registered agent as a normal model directory: a full fine-tune bit for bit, a LoRA agent merged into its base."""

from pathlib import Path

import torch
from blake3 import blake3

from ..arithmetic.codec import codec_dtype
from ..errors import CorruptedFileError
from ..progress import Progress
from ..storage.base_model import check_base_tensor, open_recorded_base
from ..storage.checkpoint import Checkpoint, CheckpointWriter, copy_model_files, parse_size, plan_shards
from ..storage.durable import check_output_dir, output_dir_stage
from ..storage.manifest import TensorRecord
from ..storage.registry import AgentRegistry, RegisteredAgent
from ..storage.tensor_file import DTYPES, TensorInfo, tensor_bytes
from ..task_vector import TILE_NUMEL, TaskVector, open_task_vector


__all__ = ["restore_agent"]


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
        records = registered.tensors()
        infos = [
            TensorInfo(info.name, _restored_dtype(registered, info, records), info.shape)
            for info in base.tensors.values()
        ]
        writer = CheckpointWriter(staged, plan_shards(infos, shard_bytes))
        writer.create()
        writer.open()
        done, total = 0, sum(info.nbytes for info in infos)
        for info in infos:
            source = records[info.name].tied_to or info.name
            check_base_tensor(base, info.name, records[info.name])
            _restore_tensor(task_vector, base, source, records[source], info, writer)
            done += info.nbytes
            if progress:
                progress("restore", done, total)
        base.check_unchanged()
        task_vector.check_unchanged()
        writer.close()
        task_vector.close()
        copy_model_files(base.path, staged, infos)
    return registered


def _restored_dtype(agent: RegisteredAgent, info: TensorInfo, records: dict[str, TensorRecord]) -> torch.dtype:
    """Dtype in which the agent ran: the base's, or wider if it was stored so."""
    if agent.manifest.kind == "lora":
        return info.dtype
    stored = records[records[info.name].tied_to or info.name].stored
    if stored is not None:
        return DTYPES[stored]
    return codec_dtype(info.dtype, getattr(torch, agent.manifest.snapshot.dtype)) or info.dtype


def _restore_tensor(
    task_vector: TaskVector,
    base: Checkpoint,
    source: str,
    record: TensorRecord,
    info: TensorInfo,
    writer: CheckpointWriter,
) -> None:
    """Write tensor `info` from the agent's tensor `source`: the same, or the one that it is tied to."""
    changed, hasher = source in task_vector.changed_tensors, blake3()
    for start in range(0, info.numel, TILE_NUMEL):
        base_tile = base.read(source, start, min(start + TILE_NUMEL, info.numel))
        tile = task_vector.agent_tile(source, start, base_tile) if changed else None
        tile = base_tile if tile is None else tile
        if record.stored is not None:
            hasher.update(tensor_bytes(tile.to(DTYPES[record.stored])))
        writer.write(info.name, start, tile.to(info.dtype))
    if record.stored is not None and hasher.hexdigest() != record.agent:
        raise CorruptedFileError(
            f"tensor {source!r} of agent {task_vector.agent} does not come back as it was registered"
        )
