"""Registering an agent that is on disk: a checkpoint directory, a PEFT adapter directory, or a Hub id."""

import math
import os
import shutil
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..arithmetic.codec import DTYPE_OPTIONS, is_mergeable
from ..arithmetic.defaults import DEFAULT_EPSILON
from ..errors import BaseModelError, ConfigError, IncompatibleAgentError, UnsupportedModelError
from ..progress import Progress
from ..storage.checkpoint import ADAPTER_CONFIG, Checkpoint, is_adapter
from ..storage.durable import explain_os_errors, read_json
from ..storage.manifest import BaseRecord, LoraRecord, Manifest, SnapshotRecord, TensorRecord
from ..storage.registry import (
    ADAPTER,
    ADAPTER_MAP,
    TENSORS,
    AgentRegistry,
    RegisteredAgent,
    check_agent_name,
    write_records,
)
from ..storage.tensor_file import TensorInfo
from ..threads import Scratch
from ..version import __version__
from .adapter import map_adapter
from .checks import check_finite
from .snapshot import AgentTensor, FullSnapshot, base_records, total_parameters


__all__ = ["build_manifest", "check_options", "register_agent", "write_lora_records"]


def register_agent(
    registry: AgentRegistry | str,
    agent: str,
    model: str,
    *,
    base_model: str | None = None,
    revision: str | None = None,
    snapshot_dtype: str = "auto",
    epsilon: float = DEFAULT_EPSILON,
    training: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> RegisteredAgent:
    """Put an agent that is on disk into the registry.

    Args:
        registry ([`AgentRegistry`] or `str`):
            The registry.
        agent (`str`):
            Name to register under.
        model (`str`):
            Checkpoint directory, PEFT adapter directory or Hub id.
        base_model (`str`, *optional*):
            Directory or Hub id of the base model; an adapter names its own.
        revision (`str`, *optional*):
            Revision of the base model on the Hub.
        snapshot_dtype (`str`, *optional*, defaults to `"auto"`):
            `"auto"` stores the agent's own dtype. `"bfloat16"` and `"float16"` round it where the base has that dtype,
            as autocast does. `"float32"` stores float32.
        epsilon (`float`, *optional*, defaults to `1e-5`):
            Where values are stored in float32, changes of at most this size are not stored.
        training (`Mapping`, *optional*):
            Where the agent comes from; recorded in its manifest.
        progress (`Callable`, *optional*):
            Called with what is being done, the bytes done and the bytes to do.

    Returns:
        [`RegisteredAgent`]: the new version, durable when this returns.
    """
    check_options(agent, snapshot_dtype, epsilon)
    # Refuse what can be refused before anything is created.
    trained = Checkpoint.open(model)
    for info in trained.tensors.values():
        if info.dtype.is_floating_point and not is_mergeable(info.dtype):
            raise UnsupportedModelError(
                f"tensor {info.name!r} of the agent is {info.dtype}: save the agent in bfloat16, float16 or float32"
            )
    adapter = is_adapter(trained.path)
    if base_model is None and adapter:
        base_model = read_json(trained.path / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(base_model, str | os.PathLike):
        raise BaseModelError("no base model was named: pass --base_model (a directory or a Hub id)")
    base = Checkpoint.open(base_model, revision)
    if not any(is_mergeable(info.dtype) and info.numel for info in base.tensors.values()):
        raise BaseModelError(f"{base.name} has no parameter in bfloat16, float16 or float32")
    registry = AgentRegistry(registry)
    with registry.stage(agent) as staged:
        if adapter:
            manifest = _copy_adapter(staged, trained, base, progress)
        else:
            manifest = _write_deltas(staged, trained, base, DTYPE_OPTIONS[snapshot_dtype], epsilon, progress)
        manifest.agent, manifest.training = agent, {"model": trained.name, **(training or {})}
        return registry.commit(staged, manifest)


def check_options(agent: str, snapshot_dtype: str, epsilon: float) -> None:
    """Refuse options that no registration can use.

    Raises:
        InvalidNameError: if the name of the agent is not one.
        ConfigError: if the dtype is unknown or epsilon is not a finite number of at least 0.
    """
    check_agent_name(agent)
    if snapshot_dtype not in DTYPE_OPTIONS:
        raise ConfigError(f"snapshot_dtype={snapshot_dtype!r} is not one of {', '.join(DTYPE_OPTIONS)}")
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise ConfigError(f"epsilon={epsilon} must be a finite number of at least 0")


def build_manifest(
    kind: str, base: Checkpoint, records: dict[str, TensorRecord], snapshot: SnapshotRecord
) -> Manifest:
    """Manifest of an agent that is being registered; its name, training and files are still to be filled in."""
    return Manifest(
        agent="",
        kind=kind,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        ram_trl_version=__version__,
        base_model=BaseRecord(
            name=base.name,
            revision=base.revision,
            digest=BaseRecord.digest_of(records),
            total_parameters=total_parameters(records),
        ),
        snapshot=snapshot,
    )


def write_lora_records(
    staged: Path, base: Checkpoint, lora: dict[str, LoraRecord], dtype: torch.dtype, progress: Progress | None
) -> Manifest:
    """Write what is recorded beside an adapter's own two files."""
    records: dict[str, TensorRecord] = {}
    done, total = 0, sum(info.nbytes for info in base.tensors.values())
    for info in base.tensors.values():
        records.update(base_records(base, [info.name]))
        done += info.nbytes
        if progress:
            progress("reading the base", done, total)
    write_records(staged / TENSORS, records)
    write_records(staged / ADAPTER_MAP, lora)
    return build_manifest("lora", base, records, SnapshotRecord(dtype=str(dtype).removeprefix("torch.")))


def _copy_adapter(staged: Path, trained: Checkpoint, base: Checkpoint, progress: Progress | None) -> Manifest:
    config = read_json(trained.path / ADAPTER_CONFIG)
    shapes = {name: info.shape for name, info in trained.tensors.items()}
    lora = map_adapter(shapes, config, base)
    for name in trained.tensors:
        check_finite(name, trained.read(name))
    with explain_os_errors(f"copying the adapter to {staged}"):
        for name in (ADAPTER, ADAPTER_CONFIG):
            shutil.copyfile(trained.path / name, staged / name)
    return write_lora_records(staged, base, lora, next(iter(trained.tensors.values())).dtype, progress)


def _write_deltas(
    staged: Path,
    trained: Checkpoint,
    base: Checkpoint,
    dtype: torch.dtype | None,
    epsilon: float,
    progress: Progress | None,
) -> Manifest:
    if not set(trained.tensors) & set(base.tensors):
        raise IncompatibleAgentError(f"{trained.name} has no tensor in common with the base {base.name}")
    done, total = 0, sum(info.nbytes for info in trained.tensors.values())
    scratch = Scratch()
    with FullSnapshot(staged, base, dtype, epsilon) as snapshot:
        for info in trained.tensors.values():
            snapshot.add(_tensor_of(trained, info, scratch))
            done += info.nbytes
            if progress:
                progress("snapshot", done, total)
        records, record = snapshot.finish()
    return build_manifest("full", base, records, record)


def _tensor_of(trained: Checkpoint, info: TensorInfo, scratch: Scratch) -> AgentTensor:
    def read(start: int, stop: int) -> Tensor:
        return trained.read(info.name, start, stop, scratch.take((stop - start) * info.dtype.itemsize))

    return AgentTensor(info.name, info.dtype, info.shape, read)
