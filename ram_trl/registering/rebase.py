"""An agent of one base as an agent of another: its task vector is carried over.

What was trained from a generalist is registered against that generalist. To be merged with agents of the original base
it needs that base: agent' = original + (agent - generalist).
"""

import shutil
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..arithmetic.codec import DTYPE_OPTIONS, TILE_NUMEL
from ..arithmetic.defaults import DEFAULT_EPSILON
from ..arithmetic.select import select
from ..errors import BaseModelError, ConfigError
from ..progress import Progress
from ..storage.base_model import BaseDigests, open_recorded_base
from ..storage.checkpoint import ADAPTER_CONFIG, Checkpoint
from ..storage.durable import explain_os_errors, read_json
from ..storage.manifest import GeneralistManifest, Manifest
from ..storage.registry import ADAPTER, AgentRegistry, RegisteredAgent
from ..storage.tensor_file import TensorInfo
from ..storage.versions import MANIFEST
from ..task_vector import TaskVector, open_task_vector
from .adapter import check_targets
from .records import build_manifest, write_lora_records
from .register import check_options
from .snapshot import AgentTensor, FullSnapshot


__all__ = ["rebase_agent"]


def rebase_agent(
    registry: AgentRegistry | str,
    agent: str,
    *,
    base_model: str | None = None,
    revision: str | None = None,
    present_base: str | None = None,
    snapshot_dtype: str = "auto",
    epsilon: float = DEFAULT_EPSILON,
    progress: Progress | None = None,
) -> RegisteredAgent:
    """Register an agent anew, against another base.

    Exact are the factors of a LoRA agent, and of a full one every parameter in which both bases agree. Elsewhere the
    sum is rounded to the new base's dtype, or kept in float32; `manifest.snapshot.hidden_update` says which share of
    the update that took away.

    Args:
        registry ([`AgentRegistry`] or `str`):
            The registry.
        agent (`str`):
            `"math"` (its latest version) or `"math@v2"`.
        base_model (`str`, *optional*):
            Directory or Hub id of the new base; by default the base of the generalist that the agent was trained from.
        revision (`str`, *optional*):
            Revision of the new base on the Hub.
        present_base (`str`, *optional*):
            Where the agent's present base is now, if not where it was.
        snapshot_dtype (`str`, *optional*, defaults to `"auto"`):
            `"auto"` rounds to the new base's dtype if the agent was stored in 16 bits. `"float32"` does not round.
        epsilon (`float`, *optional*, defaults to `1e-5`):
            Where values are stored in float32, changes of at most this size are not stored.
        progress (`Callable`, *optional*):
            Called with what is being done, the bytes done and the bytes to do.

    Returns:
        [`RegisteredAgent`]: the new version of the same agent, durable when this returns.

    Raises:
        BaseModelError: if a base cannot be had, or they are not models of one kind.
        ConfigError: if the agent has that base already.
    """
    registry = AgentRegistry(registry)
    registered = registry.get(agent)
    check_options(registered.name, snapshot_dtype, epsilon)
    registered.verify()
    old = open_recorded_base(registered, present_base)
    if base_model is None:
        base_model, revision = _base_of_generalist(registered, old)
    new = Checkpoint.open(base_model, revision)
    _check_alike(old, new)
    with registry.stage(registered.name) as staged:
        if registered.manifest.kind == "lora":
            manifest = _carry_adapter(staged, registered, new, progress)
        else:
            dtype = DTYPE_OPTIONS[snapshot_dtype] or getattr(torch, registered.manifest.snapshot.dtype)
            manifest = _carry_deltas(staged, registered, old, new, dtype, epsilon, progress)
        if manifest.base_model.digest == registered.manifest.base_model.digest:
            raise ConfigError(f"agent {registered} has the base {new.name} already")
        manifest.agent = registered.name
        manifest.training = {**registered.manifest.training, "rebased_from": str(registered)}
        return registry.commit(staged, manifest)


def _base_of_generalist(agent: RegisteredAgent, base: Checkpoint) -> tuple[str, str | None]:
    """Name and revision of the base of the generalist that an agent was trained from."""
    path = base.path / MANIFEST
    if not path.exists():
        raise BaseModelError(f"agent {agent} was not trained from a generalist: name the new base with --base_model")
    record = GeneralistManifest.from_dict(read_json(path), str(path)).base_model
    return record.name, record.revision


def _check_alike(old: Checkpoint, new: Checkpoint) -> None:
    """Refuse models of different names or shapes of tensors. One may hold its tied output head, the other not."""
    shapes = [
        {info.name: info.shape for info in base.tensors.values() if info.name not in base.tied} for base in (old, new)
    ]
    if different := sorted({name for name, _ in shapes[0].items() ^ shapes[1].items()}):
        raise BaseModelError(
            f"{old.name} and {new.name} are not models of one kind: tensor {different[0]!r} is not the same in both"
        )


def _carry_adapter(staged: Path, agent: RegisteredAgent, new: Checkpoint, progress: Progress | None) -> Manifest:
    lora = agent.adapter_map()
    check_targets(lora, new)
    with explain_os_errors(f"copying the adapter to {staged}"):
        for name in (ADAPTER, ADAPTER_CONFIG):
            shutil.copyfile(agent.path / name, staged / name)
    dtype = getattr(torch, agent.manifest.snapshot.dtype)
    return write_lora_records(staged, new, lora, dtype, progress)


def _carry_deltas(
    staged: Path,
    agent: RegisteredAgent,
    old: Checkpoint,
    new: Checkpoint,
    dtype: torch.dtype,
    epsilon: float,
    progress: Progress | None,
) -> Manifest:
    vector, digests = open_task_vector(agent), BaseDigests(old, agent.tensors())
    infos = [info for info in new.tensors.values() if info.name not in new.tied]
    done, total = 0, sum(info.nbytes for info in infos)
    with FullSnapshot(staged, new, dtype, epsilon) as snapshot:
        for info in infos:
            if info.name in vector.changed_tensors:
                digests.compare(info.name, old.digest(info.name))
                snapshot.add(_carried(info, vector, old, new))
            else:
                snapshot.add(AgentTensor(info.name, info.dtype, info.shape, partial(new.read, info.name)))
            done += info.nbytes
            if progress:
                progress("rebase", done, total)
        records, record = snapshot.finish()
    vector.close()
    return build_manifest("full", new, records, record)


def _carried(info: TensorInfo, vector: TaskVector, old: Checkpoint, new: Checkpoint) -> AgentTensor:
    """A tensor of the agent over the new base, in float32."""

    def read(start: int, stop: int) -> Tensor:
        base, moved = old.read(info.name, start, stop), new.read(info.name, start, stop).float()
        tiles = []
        for offset in range(0, stop - start, TILE_NUMEL):
            tile = base[offset : offset + TILE_NUMEL]
            trained = vector.agent_tile(info.name, start + offset, tile)
            tiles.append(tile.float() if trained is None else trained.float())
        trained, base = torch.cat(tiles), base.float()
        # where the bases agree the agent keeps its own bits: base + (agent - base) need not be the agent
        return select(base == moved, trained, moved + (trained - base))

    return AgentTensor(info.name, torch.float32, info.shape, read)
