"""The plan of a merge, made from headers and records alone. Whatever can be refused is refused here."""

import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch

from ..arithmetic import kernels
from ..arithmetic.codec import DTYPE_OPTIONS, is_mergeable
from ..arithmetic.defaults import DEFAULT_EPSILON
from ..arithmetic.methods import METHODS
from ..arithmetic.methods.matrices import is_linear_layer
from ..arithmetic.methods.method import fill_options
from ..arithmetic.tile import ENGINES
from ..distributed import World
from ..errors import ConfigError, CorruptedFileError, DistributedError
from ..storage.base_model import check_records, check_same_base, open_recorded_base
from ..storage.checkpoint import Checkpoint
from ..storage.fisher import FisherStore, StoredFisher
from ..storage.manifest import TensorRecord
from ..storage.registry import AgentRegistry, RegisteredAgent
from ..storage.tensor_file import TensorFile, TensorInfo
from ..task_vector import TaskVector, open_task_vector


__all__ = ["ROUNDINGS", "MergePlan", "MergeSettings", "plan_merge", "plan_together"]

ROUNDINGS = ("nearest", "stochastic")
# Beyond it float32 arithmetic would lose what it merges; no use is known.
_LARGEST = 1e6
# How often ranks look again that saw different versions, and seconds in between: shared file systems are late by some.
_LOOKS, _PAUSE = 5, 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeSettings:
    """How to merge. See [`merge_agents`] for the meaning of the fields.

    Raises:
        ConfigError: if a value cannot be used.
    """

    method: str = "ram_plus"
    method_options: Mapping[str, float] = field(default_factory=dict)
    r: float = 0.1
    alpha: float = 2.0
    epsilon: float = DEFAULT_EPSILON
    weights: Mapping[str, float] = field(default_factory=dict)
    output_dtype: str = "auto"
    rounding: str = "nearest"
    seed: int = 0
    engine: str = "auto"

    def __post_init__(self):
        try:
            # numbers of NumPy, which a report in JSON has not
            for name in ("r", "alpha", "epsilon"):
                object.__setattr__(self, name, float(getattr(self, name)))
            object.__setattr__(self, "seed", operator.index(self.seed))
            for name in ("weights", "method_options"):
                numbers = {str(key): float(value) for key, value in (getattr(self, name) or {}).items()}
                object.__setattr__(self, name, numbers)
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"an option of the merge has a value of the wrong type: {error}") from error
        for name, value, choices in (
            ("method", self.method, METHODS),
            ("output_dtype", self.output_dtype, DTYPE_OPTIONS),
            ("rounding", self.rounding, ROUNDINGS),
            ("engine", self.engine, ENGINES),
        ):
            if not isinstance(value, str) or value not in choices:
                raise ConfigError(f"{name}={value!r} is not one of {', '.join(choices)}")
        # a number that is not finite is in no range
        object.__setattr__(self, "method_options", fill_options(METHODS[self.method], self.method_options))
        for name, value in (("r", self.r), ("alpha", self.alpha), ("epsilon", self.epsilon)):
            if not 0 <= value <= _LARGEST:
                raise ConfigError(f"{name}={value} must be a number from 0 to {_LARGEST:g}")
        for agent, weight in self.weights.items():
            if not 1 / _LARGEST <= weight <= _LARGEST:
                raise ConfigError(
                    f"weight {agent}={weight} must be a number from {1 / _LARGEST:g} to {_LARGEST:g}; to give an "
                    "agent no weight, leave it out"
                )
        if self.engine == "compiled" and kernels.compiled is None:
            raise ConfigError(
                "engine=compiled, but this installation has no compiled loops: install ram_trl again where there is a "
                "C compiler, or merge with --engine eager"
            )
        if self.engine == "compiled" and not METHODS[self.method].is_compiled:
            raise ConfigError(f"engine=compiled is not for method={self.method}: merge with --engine auto")


@dataclass(kw_only=True, slots=True)
class MergePlan:
    """All that the two passes need to know.

    Args:
        agents (`list[RegisteredAgent]`):
            Agents of the merge, in the order given.
        vectors (`list[TaskVector]`):
            Their task vectors, open.
        fishers (`list[TensorFile]`):
            Their Fisher information, open, if the method needs it.
        recorded (`list[RegisteredAgent | StoredFisher]`):
            Both as they are on disk, to be verified before anything is merged.
        base ([`~ram_trl.storage.checkpoint.Checkpoint`]):
            Base model, open.
        records (`dict[str, TensorRecord]`):
            Records of the base's tensors.
        settings ([`MergeSettings`]):
            How to merge.
        weights (`list[float]`):
            Weight of every agent.
        touched_by (`dict[str, list[int]]`):
            For every tensor that is changed at all, the positions of the agents that change it.
        outputs (`list[TensorInfo]`):
            Tensors of the merged model, in the base's order.
        copies_of (`dict[str, list[TensorInfo]]`):
            The output tensors that are made from each base tensor: itself, and those tied to it.
    """

    agents: list[RegisteredAgent]
    vectors: list[TaskVector]
    fishers: list[TensorFile]
    recorded: list[RegisteredAgent | StoredFisher]
    base: Checkpoint
    records: dict[str, TensorRecord]
    settings: MergeSettings
    weights: list[float]
    touched_by: dict[str, list[int]]
    outputs: list[TensorInfo]
    copies_of: dict[str, list[TensorInfo]]

    def share(self, rank: int, size: int) -> list[str]:
        """Tensors that a rank works on: largest first, each to the rank with the fewest bytes so far."""
        loads, names = [0] * size, []
        sources = [self.base.tensors[source] for source in self.copies_of]
        for info in sorted(sources, key=lambda info: (-info.nbytes, info.name)):
            lightest = loads.index(min(loads))
            loads[lightest] += info.nbytes
            if lightest == rank:
                names.append(info.name)
        return names

    def nbytes(self, names: Sequence[str]) -> int:
        """Bytes of some of the base's tensors."""
        return sum(self.base.tensors[name].nbytes for name in names)

    @property
    def is_compiled(self) -> bool:
        """Whether the compiled loops merge, or torch."""
        settings = self.settings
        return METHODS[settings.method].is_compiled and kernels.compiled is not None and settings.engine != "eager"

    def is_whole(self, name: str) -> bool:
        """Whether the method merges a tensor of the base as one matrix."""
        sees_matrices = METHODS[self.settings.method].merge_matrix is not None
        info = self.base.tensors[name]
        return sees_matrices and name in self.touched_by and is_linear_layer(name, info.shape)

    def check_unchanged(self) -> None:
        """Refuse inputs that were written to since they were opened: what was checked is not what was merged."""
        for source in (self.base, *self.vectors, *self.fishers):
            source.check_unchanged()

    def close(self) -> None:
        for source in (*self.vectors, *self.fishers):
            source.close()

    def versions(self) -> list[str]:
        """What is merged, to the byte: agents and Fisher information with the digests of their records."""
        fishers = [str(asdict(stored.manifest)) for stored in self.recorded[len(self.agents) :]]
        return [*(f"{agent} ({agent.digest})" for agent in self.agents), *fishers]


def plan_together(make_plan: Callable[[], MergePlan], world: World) -> MergePlan:
    """Plan on every rank, each from what it finds on disk, until all of them have found the same versions.

    A name means another version as soon as a run registers one or an alias moves, and ranks do not look at one moment.

    Raises:
        DistributedError: if they do not find the same.
    """
    for _ in range(_LOOKS):
        plan = world.run(make_plan)
        found = world.gather(plan.versions())
        if all(versions == found[0] for versions in found):
            return plan
        plan.close()
        time.sleep(_PAUSE)
    rank, other = next((rank, versions) for rank, versions in enumerate(found) if versions != found[0])
    one, another = (", ".join(versions) for versions in (found[0], other))
    raise DistributedError(
        f"rank 0 finds {one} in the registry, rank {rank} finds {another}: give all ranks one registry, and name "
        "versions"
    )


def plan_merge(
    registry: AgentRegistry, agents: Sequence[str] | None, settings: MergeSettings, base_model: str | None = None
) -> MergePlan:
    """Look everything up and check that it fits together.

    Args:
        registry ([`AgentRegistry`]):
            The registry.
        agents (`Sequence[str]`, *optional*):
            Agents to merge, `"math"`, `"math@v2"` or `"math@best"`; by default the latest version of every agent.
        settings ([`MergeSettings`]):
            How to merge.
        base_model (`str`, *optional*):
            Where the base model is now, if not where it was.

    Raises:
        RamTrlError: of the class that says what does not fit.
    """
    chosen = list(registry) if agents is None else [registry.get(spec) for spec in agents]
    if not chosen:
        raise ConfigError(f"no agent to merge: {f'{registry.path} holds none' if agents is None else 'none is named'}")
    for position, agent in enumerate(chosen):
        if (agent.name, agent.version) in [(other.name, other.version) for other in chosen[:position]]:
            raise ConfigError(f"agent {agent} is named twice in --agents")
        if agent.manifest.snapshot.epsilon > settings.epsilon:
            raise ConfigError(
                f"agent {agent} was stored without changes of at most {agent.manifest.snapshot.epsilon:g}: merge with "
                f"--epsilon {agent.manifest.snapshot.epsilon:g} or more, or register it again with a smaller epsilon"
            )
    check_same_base(chosen)
    base = open_recorded_base(chosen[0], base_model)
    records = chosen[0].tensors()
    for agent in chosen[1:]:
        check_records(agent, base)
        if any(record.tied_to != records[name].tied_to for name, record in agent.tensors().items()):
            raise CorruptedFileError(f"agents {chosen[0]} and {agent} tie tensors of the same base in different ways")
    vectors = [open_task_vector(agent) for agent in chosen]
    touched_by: dict[str, list[int]] = {}
    for position, vector in enumerate(vectors):
        for name in vector.changed_tensors:
            if name not in records or not is_mergeable(base.tensors[name].dtype):
                raise CorruptedFileError(f"agent {vector.agent} changes {name!r}, which is no parameter of the base")
            touched_by.setdefault(name, []).append(position)
    outputs = [
        TensorInfo(info.name, _output_dtype(info.dtype, settings.output_dtype), info.shape)
        for info in base.tensors.values()
    ]
    copies_of: dict[str, list[TensorInfo]] = {}
    for info in outputs:
        copies_of.setdefault(records[info.name].tied_to or info.name, []).append(info)
    stored = [FisherStore(registry).get(agent) for agent in chosen] if METHODS[settings.method].needs_fisher else []
    return MergePlan(
        agents=chosen,
        vectors=vectors,
        fishers=_open_fishers(stored, base, touched_by),
        recorded=[*chosen, *stored],
        base=base,
        records=records,
        settings=settings,
        weights=_weights(chosen, agents or [agent.name for agent in chosen], settings.weights),
        touched_by=touched_by,
        outputs=outputs,
        copies_of=copies_of,
    )


def _open_fishers(stored: Sequence[StoredFisher], base: Checkpoint, touched: Iterable[str]) -> list[TensorFile]:
    fishers = [fisher.open_weights() for fisher in stored]
    for fisher, file in zip(stored, fishers, strict=True):
        for name in touched:
            if name not in file.tensors or file.tensors[name].shape != base.tensors[name].shape:
                raise CorruptedFileError(
                    f"the Fisher of agent {fisher.agent} has no tensor {name!r} of the base's shape: {fisher.cure}"
                )
    return fishers


def _weights(agents: list[RegisteredAgent], specs: Sequence[str], weights: Mapping[str, float]) -> list[float]:
    # of an agent that an alias names, the alias too
    names = [(str(agent), spec, agent.name) for agent, spec in zip(agents, specs, strict=True)]
    known = {name for known in names for name in known}
    if unknown := sorted(set(weights) - known):
        raise ConfigError(
            f"--weights names {unknown[0]!r}, which is not merged; merged are: {', '.join(sorted(known))}"
        )
    return [float(next((weights[name] for name in known if name in weights), 1.0)) for known in names]


def _output_dtype(base: torch.dtype, output_dtype: str) -> torch.dtype:
    wanted = DTYPE_OPTIONS[output_dtype]
    return base if wanted is None or not is_mergeable(base) else wanted
