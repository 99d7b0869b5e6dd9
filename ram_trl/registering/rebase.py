"""An agent of one base as an agent of another: its task vector is carried over.

What was trained from a generalist is registered against that generalist. To be merged with agents of the original base
it needs that base: agent' = original + (agent - generalist).
"""

import contextlib
import functools
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from ..arithmetic.codec import DTYPE_OPTIONS, TILE_NUMEL, is_mergeable
from ..arithmetic.select import select
from ..errors import BaseModelError, ConfigError
from ..progress import Progress
from ..storage.base_model import BaseDigests, open_recorded_base
from ..storage.checkpoint import ADAPTER_CONFIG, Checkpoint
from ..storage.durable import explain_os_errors, read_json, write_json
from ..storage.manifest import BaseRecord, GeneralistManifest, Manifest
from ..storage.registry import ADAPTER, AgentRegistry, RegisteredAgent
from ..storage.stream_writer import write_tensors
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
    new_base: str | None = None,
    revision: str | None = None,
    base_model: str | None = None,
    snapshot_dtype: str = "auto",
    epsilon: float | None = None,
    progress: Progress | None = None,
) -> RegisteredAgent:
    """Register an agent anew, against another base.

    Exact are the factors of a LoRA agent, and of a full one every parameter in which both bases agree. Elsewhere the
    sum is rounded to the new base's dtype, or kept in float32; `manifest.snapshot.hidden_update` says which share of
    the update the rounding took away.

    Args:
        registry ([`AgentRegistry`] or `str`):
            The registry.
        agent (`str`):
            `"math"` (its latest version) or `"math@v2"`.
        new_base (`str`, *optional*):
            Directory or Hub id of the new base; by default the base of the generalist that the agent was trained from.
        revision (`str`, *optional*):
            Revision of the new base on the Hub.
        base_model (`str`, *optional*):
            Where the agent's present base is now, if not where it was.
        snapshot_dtype (`str`, *optional*, defaults to `"auto"`):
            `"auto"` rounds to the new base's dtype, unless some of the agent is stored in float32. `"float32"` does
            not round.
        epsilon (`float`, *optional*):
            Where values are stored in float32, changes of at most this size are not stored; by default as they were.
        progress (`Callable`, *optional*):
            Called with what is being done, the bytes done and the bytes to do.

    Returns:
        [`RegisteredAgent`]: the new version of the same agent, durable when this returns.

    Raises:
        BaseModelError: if a base cannot be had, is not the recorded one, or they are not models of one kind.
        ConfigError: if the agent has that base already.
    """
    registry = AgentRegistry(registry)
    registered = registry.get(agent)
    stored_epsilon = registered.manifest.snapshot.epsilon
    epsilon = stored_epsilon if epsilon is None else epsilon
    check_options(registered.name, snapshot_dtype, epsilon)
    if revision is not None and new_base is None:
        raise ConfigError("revision is that of the new base: name it with new_base (--new_base)")
    registered.verify()
    old = open_recorded_base(registered, base_model)
    expected = None
    if new_base is None:
        expected = _base_of_generalist(registered, old)
        new_base, revision = expected.name, expected.revision
    new = Checkpoint.open(new_base, revision)
    _check_alike(old, new)
    digests = BaseDigests(old, registered.tensors())
    with registry.stage(registered.name) as staged, contextlib.closing(open_task_vector(registered)) as vector:
        if registered.manifest.kind == "lora":
            manifest = _carry_adapter(staged, registered, old, new, digests, progress)
        else:
            dtype = DTYPE_OPTIONS[snapshot_dtype] or _rounded_to(registered, new)
            manifest = _carry_deltas(staged, vector, old, new, digests, dtype, epsilon, progress)
            # what was not stored then is not there now
            manifest.snapshot.epsilon = max(manifest.snapshot.epsilon, stored_epsilon)
        for source in (old, new, vector):
            source.check_unchanged()
        if manifest.base_model.digest == registered.manifest.base_model.digest:
            raise ConfigError(f"agent {registered} has the base {new.name} already")
        if expected is not None and manifest.base_model.digest != expected.digest:
            raise BaseModelError(
                f"{new.name} is not the base that the generalist was merged over: its weights changed; restore them, "
                "or name their directory with --new_base"
            )
        manifest.agent = registered.name
        manifest.training = {**registered.manifest.training, "rebased_from": str(registered)}
        return registry.commit(staged, manifest)


def _base_of_generalist(agent: RegisteredAgent, base: Checkpoint) -> BaseRecord:
    """The base of the generalist that an agent was trained from."""
    path = base.path / MANIFEST
    content = read_json(path) if path.exists() else {}
    if "generalist" not in content:
        raise BaseModelError(f"agent {agent} was not trained from a generalist: name the new base with --new_base")
    return GeneralistManifest.from_dict(content, str(path)).base_model


def _check_alike(old: Checkpoint, new: Checkpoint) -> None:
    """Refuse models of different names or shapes of tensors. One may hold its tied output head, the other not."""
    shapes = [
        {info.name: info.shape for info in base.tensors.values() if info.name not in base.tied} for base in (old, new)
    ]
    if different := sorted({name for name, _ in shapes[0].items() ^ shapes[1].items()}):
        raise BaseModelError(
            f"{old.name} and {new.name} are not models of one kind: tensor {different[0]!r} is not the same in both"
        )


def _rounded_to(agent: RegisteredAgent, new: Checkpoint) -> torch.dtype:
    """The dtype that most of the new base has; float32 if the agent has values in that."""
    if any(record.stored == "F32" for record in agent.tensors().values()):
        return torch.float32
    numel: Counter[torch.dtype] = Counter()
    for info in new.tensors.values():
        if is_mergeable(info.dtype):
            numel[info.dtype] += info.numel
    return numel.most_common(1)[0][0]


def _carry_adapter(
    staged: Path,
    agent: RegisteredAgent,
    old: Checkpoint,
    new: Checkpoint,
    digests: BaseDigests,
    progress: Progress | None,
) -> Manifest:
    """The factors stay as they are; a module that was trained in full beside them is carried over."""
    lora = agent.adapter_map()
    check_targets(lora, new)
    base_of = {record.replaced_by: name for name, record in lora.items() if record.replaced_by is not None}
    with contextlib.closing(agent.open_weights()) as file:
        state = {key: file.read(key).view(info.shape) for key, info in file.tensors.items()}
    for key, name in base_of.items():
        digests.compare(name, old.digest(name))
        moved = _moved(state[key].float().view(-1), old.read(name), new.read(name))
        state[key] = moved.view(state[key].shape).to(state[key].dtype)
    with explain_os_errors(f"writing the adapter to {staged}"):
        write_tensors(staged / ADAPTER, state)
        config = read_json(agent.path / ADAPTER_CONFIG)
        write_json(staged / ADAPTER_CONFIG, {**config, "base_model_name_or_path": new.name})
    dtype = getattr(torch, agent.manifest.snapshot.dtype)
    return write_lora_records(staged, new, lora, dtype, progress)


def _carry_deltas(
    staged: Path,
    vector: TaskVector,
    old: Checkpoint,
    new: Checkpoint,
    digests: BaseDigests,
    dtype: torch.dtype,
    epsilon: float,
    progress: Progress | None,
) -> Manifest:
    infos = [info for info in new.tensors.values() if info.name not in new.tied]
    done, total = 0, sum(info.nbytes for info in infos)
    with FullSnapshot(staged, new, dtype, epsilon) as snapshot:
        for info in infos:
            if info.name in vector.changed_tensors:
                digests.compare(info.name, old.digest(info.name))
                snapshot.add(_carried(info, vector, old, new))
            else:
                snapshot.add(AgentTensor(info.name, info.dtype, info.shape, functools.partial(new.read, info.name)))
            done += info.nbytes
            if progress:
                progress("rebase", done, total)
        records, record = snapshot.finish()
    return build_manifest("full", new, records, record)


def _carried(info: TensorInfo, vector: TaskVector, old: Checkpoint, new: Checkpoint) -> AgentTensor:
    """A tensor of the agent over the new base, in float32."""

    def read(start: int, stop: int) -> Tensor:
        base, tiles = old.read(info.name, start, stop), []
        for offset in range(0, stop - start, TILE_NUMEL):
            tile = base[offset : offset + TILE_NUMEL]
            trained = vector.agent_tile(info.name, start + offset, tile)
            tiles.append(tile.float() if trained is None else trained.float())
        return _moved(torch.cat(tiles), base, new.read(info.name, start, stop))

    return AgentTensor(info.name, torch.float32, info.shape, read)


def _moved(trained: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """new + (trained - old) in float32; where the bases agree the agent keeps its own bits, which the sum may not."""
    old, new = old.float(), new.float()
    return select(old == new, trained, new + (trained - old))
