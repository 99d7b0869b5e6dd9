"""Registering an agent that is on disk: a checkpoint directory, a PEFT adapter directory, or a Hub id."""

import math
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..arithmetic.codec import DTYPE_OPTIONS, is_mergeable
from ..arithmetic.defaults import DEFAULT_EPSILON
from ..errors import BaseModelError, ConfigError, IncompatibleAgentError, UnsupportedModelError
from ..progress import Progress
from ..storage.checkpoint import ADAPTER_CONFIG, Checkpoint, is_adapter
from ..storage.durable import read_json
from ..storage.manifest import Manifest
from ..storage.registry import AgentRegistry, RegisteredAgent, check_agent_name
from ..storage.tensor_file import TensorInfo
from ..threads import Scratch
from .records import build_manifest
from .saved_adapter import adapter_writer
from .snapshot import AgentTensor, FullSnapshot
from .training_log import check_provenance, public_metrics, saved_run


__all__ = ["check_options", "register_agent"]


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
    provenance: str = "full",
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
        provenance (`str`, *optional*, defaults to `"full"`):
            What is recorded beside: `"full"`, where the model was, and, of a trainer's checkpoint, steps and last
            metrics; `"minimal"` of that the steps and the metrics that every trainer has.
        progress (`Callable`, *optional*):
            Called with what is being done, the bytes done and the bytes to do.

    Returns:
        [`RegisteredAgent`]: the new version, durable when this returns.
    """
    check_options(agent, snapshot_dtype, epsilon)
    check_provenance(provenance)
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
    dtype = DTYPE_OPTIONS[snapshot_dtype]
    if adapter:
        write = adapter_writer(trained, base, dtype, epsilon, progress)
    else:
        write = partial(_write_deltas, trained, base, dtype, epsilon, progress)
    registry = AgentRegistry(registry)
    with registry.stage(agent) as staged:
        manifest = write(staged)
        manifest.agent = agent
        manifest.training = {**_origin(trained, provenance), **manifest.training, **(training or {})}
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


def _origin(trained: Checkpoint, provenance: str) -> dict[str, Any]:
    run = saved_run(trained.path)
    if provenance == "full":
        return {"provenance": provenance, "model": trained.name, **run}
    metrics = {"metrics": public_metrics(run["metrics"])} if run else {}
    return {"provenance": provenance, **run, **metrics}


def _write_deltas(
    trained: Checkpoint,
    base: Checkpoint,
    dtype: torch.dtype | None,
    epsilon: float,
    progress: Progress | None,
    staged: Path,
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
