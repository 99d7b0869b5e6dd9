"""The base model of registered agents: found again by what was recorded, and refused if it is not the same."""

from collections.abc import Mapping

from ..errors import BaseModelError, CorruptedFileError, IncompatibleAgentError
from .checkpoint import Checkpoint
from .manifest import BaseRecord, TensorRecord
from .registry import RegisteredAgent
from .tensor_file import DTYPE_NAMES, join_digests, num_pieces


__all__ = ["BaseDigests", "check_records", "check_same_base", "differs_from_base", "open_recorded_base"]

# Bytes that are looked at to tell one base from another before anything is known of its weights.
_LOOK = 1 << 26


def check_same_base(agents: list[RegisteredAgent]) -> None:
    """Refuse agents of different bases.

    Raises:
        IncompatibleAgentError: naming two of them.
    """
    first = agents[0]
    for other in agents[1:]:
        if other.manifest.base_model.digest != first.manifest.base_model.digest:
            raise IncompatibleAgentError(
                f"agents {first} and {other} have different base models: {first.manifest.base_model.name} and "
                f"{other.manifest.base_model.name}; choose agents of one base with --agents, or carry one over to the "
                "other's base with ram-trl rebase"
            )


def open_recorded_base(agent: RegisteredAgent, base_model: str | None = None) -> Checkpoint:
    """Open an agent's base model; headers are compared with the record now, weights by [`BaseDigests`].

    Args:
        agent ([`~ram_trl.storage.registry.RegisteredAgent`]):
            The agent.
        base_model (`str`, *optional*):
            Where the base is now, if not where it was.

    Raises:
        BaseModelError: if it cannot be found or has other tensors.
    """
    recorded = agent.manifest.base_model
    try:
        # A directory has no revisions; what the folder holds is checked below.
        base = Checkpoint.open(base_model or recorded.name, None if base_model else recorded.revision)
    except BaseModelError as error:
        raise BaseModelError(
            f"the base of agent {agent} cannot be opened: {error}; if it was moved, pass --base_model with where it "
            "is now (its digests will be checked)"
        ) from error
    check_records(agent, base)
    return base


def check_records(agent: RegisteredAgent, base: Checkpoint) -> None:
    """Compare the names, dtypes and shapes of a base's tensors with an agent's records.

    Raises:
        BaseModelError: naming a tensor that differs.
        CorruptedFileError: if the records contradict each other.
    """
    records = agent.tensors()
    if BaseRecord.digest_of(records) != agent.manifest.base_model.digest:
        raise CorruptedFileError(f"agent {agent} records another base in its manifest than in its tensors")
    for name, record in records.items():
        original = records.get(record.tied_to) if isinstance(record.tied_to, str) else None
        if record.tied_to is not None and (
            original is None
            or original.tied_to is not None
            or record.stored is not None
            or (original.dtype, original.shape, original.base) != (record.dtype, record.shape, record.base)
        ):
            raise CorruptedFileError(
                f"agent {agent} ties {name!r} to {record.tied_to!r}, which is not the same tensor"
            )
    for name in [*records, *base.tensors]:
        if name not in base.tensors or name not in records:
            where = "lacks" if name in records else "has an additional"
            raise BaseModelError(f"{base.name} is not the base of agent {agent}: it {where} tensor {name!r}")
        info, record = base.tensors[name], records[name]
        if DTYPE_NAMES[info.dtype] != record.dtype or list(info.shape) != record.shape:
            raise BaseModelError(
                f"{base.name} is not the base of agent {agent}: tensor {name!r} is {DTYPE_NAMES[info.dtype]} "
                f"{list(info.shape)}, recorded was {record.dtype} {record.shape}"
            )


def differs_from_base(agent: RegisteredAgent, base: Checkpoint) -> bool:
    """Whether a model is certainly not an agent's base, from headers and from the digests of its smallest matrices."""
    records, seen = agent.tensors(), 0
    if {name: record.shape for name, record in records.items()} != {
        info.name: list(info.shape) for info in base.tensors.values()
    }:
        return True
    # training in 16 bits seldom moves a norm
    matrices = [info for info in base.tensors.values() if len(info.shape) > 1]
    for info in sorted(matrices, key=lambda info: info.nbytes):
        if base.digest(info.name) != records[info.name].base:
            return True
        seen += info.nbytes
        if seen > _LOOK:
            break
    return False


class BaseDigests:
    """Compares tensors of the base with their recorded digests, piece by piece as they are read.

    Args:
        base ([`~ram_trl.storage.checkpoint.Checkpoint`]):
            The base.
        records (`Mapping[str, TensorRecord]`):
            What was recorded of its tensors.
    """

    def __init__(self, base: Checkpoint, records: Mapping[str, TensorRecord]):
        self._base, self._records = base, records
        self._pieces: dict[str, list[bytes]] = {}

    def add(self, name: str, piece: bytes) -> None:
        """Take the digest of a tensor's next piece; with the last one the tensor is compared.

        Raises:
            BaseModelError: if the tensor's bytes are not those that were recorded.
        """
        pieces = self._pieces.setdefault(name, [])
        pieces.append(piece)
        if len(pieces) == num_pieces(self._records[name].numel):
            del self._pieces[name]
            self.compare(name, join_digests(pieces))

    def compare(self, name: str, digest: str) -> None:
        """Compare a whole tensor's digest.

        Raises:
            BaseModelError: if the tensor's bytes are not those that were recorded.
        """
        if digest != self._records[name].base:
            raise BaseModelError(
                f"{self._base.name} is not the recorded base model: the weights of tensor {name!r} differ; "
                "restore the original weights or name their directory with --base_model"
            )
