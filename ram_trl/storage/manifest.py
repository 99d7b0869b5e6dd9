"""What is written down about agents and generalists: `manifest.json` and `tensors.json` (docs/FORMAT.md)."""

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from ..errors import CorruptedFileError, UnsupportedModelError
from .record import Record
from .tensor_file import DTYPE_NAMES, DTYPES


__all__ = [
    "FORMAT_VERSION",
    "BaseRecord",
    "FileRecord",
    "GeneralistManifest",
    "LoraRecord",
    "Manifest",
    "ParentRecord",
    "SnapshotRecord",
    "TensorRecord",
]

FORMAT_VERSION = 1
# as torch names them
_DTYPE_WORDS = frozenset(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)


@dataclass(kw_only=True, slots=True)
class TensorRecord(Record):
    """One tensor of the base model, and what the agent made of it.

    Args:
        dtype (`str`):
            Dtype in the base, as in a safetensors header (`"BF16"`).
        shape (`list[int]`):
            Shape.
        base (`str`):
            Digest of the base's bytes, as [`~ram_trl.storage.tensor_file.join_digests`] defines it.
        tied_to (`str`, *optional*):
            Name of the tensor that this one repeats. It is counted and merged once, under that name.
        stored (`str`, *optional*):
            Dtype of the agent's values, for a tensor that a full fine-tune changed.
        agent (`str`, *optional*):
            Digest of the agent's bytes in that dtype.
    """

    dtype: str
    shape: list[int]
    base: str
    tied_to: str | None = None
    stored: str | None = None
    agent: str | None = None

    def __post_init__(self):
        # not super(): a dataclass with slots is another class than the one that it would look for
        Record.__post_init__(self)
        if self.dtype not in DTYPES or self.stored not in (None, *DTYPES):
            raise TypeError(f"dtype {self.dtype!a:.60} or stored {self.stored!a:.60} is not known")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(kw_only=True, slots=True)
class LoraRecord(Record):
    """How one tensor of the base is changed by tensors of the adapter file.

    Args:
        factor_a (`str`, *optional*):
            Name of A, shape (rank, in).
        factor_b (`str`, *optional*):
            Name of B, shape (out, rank).
        scaling (`float`, *optional*):
            Factor of B @ A as PEFT applied it.
        transposed (`bool`, *optional*):
            Whether the base stores the weight as (in, out).
        replaced_by (`str`, *optional*):
            Name of the tensor that takes the base's place, for a module that was trained in full beside the factors.
    """

    factor_a: str | None = None
    factor_b: str | None = None
    scaling: float = 1.0
    transposed: bool = False
    replaced_by: str | None = None


@dataclass(kw_only=True, slots=True)
class FileRecord(Record):
    """Size in bytes and BLAKE3 of a file."""

    size: int
    blake3: str


@dataclass(kw_only=True, slots=True)
class BaseRecord(Record):
    """The base model of an agent.

    Args:
        name (`str`):
            Hub id or directory.
        revision (`str`, *optional*):
            Commit of the Hub repository.
        digest (`str`):
            One digest over all its tensors, see [`BaseRecord.digest_of`].
        total_parameters (`int`):
            Number of its parameters, tied ones once.
    """

    name: str
    revision: str | None = None
    digest: str
    total_parameters: int

    @staticmethod
    def digest_of(tensors: dict[str, TensorRecord]) -> str:
        """BLAKE3 over `name dtype shape digest`, a line a tensor, sorted by name."""
        lines = [f"{name} {tensor.dtype} {tensor.shape} {tensor.base}\n" for name, tensor in sorted(tensors.items())]
        return blake3("".join(lines).encode()).hexdigest()


@dataclass(kw_only=True, slots=True)
class SnapshotRecord(Record):
    """What was taken from the training run.

    Args:
        dtype (`str`):
            Dtype of the stored parameters, `"bfloat16"`, `"float16"` or `"float32"`; of a LoRA agent that of its
            factors.
        epsilon (`float`):
            Changes of at most this size were not stored; 0 if every bit was kept.
        changed (`int`, *optional*):
            Number of elements that differ from the base as stored; unknown for the factors of a LoRA agent.
        changed_by_training (`int`, *optional*):
            If the parameters were rounded to the base's dtype: how many differed from the base before.
        hidden_update (`float`, *optional*):
            If the parameters were rounded: the share of the update, as a sum of magnitudes, that rounding took away.
    """

    dtype: str
    epsilon: float = 0.0
    changed: int | None = None
    changed_by_training: int | None = None
    hidden_update: float | None = None

    def __post_init__(self):
        Record.__post_init__(self)
        if self.dtype not in _DTYPE_WORDS:
            raise TypeError(f"dtype {self.dtype!a:.60} is not known")


@dataclass(kw_only=True, slots=True)
class Manifest(Record):
    """All that is recorded of one version of an agent.

    Args:
        agent (`str`):
            Name of the agent. The version is the name of its directory.
        kind (`str`):
            `"full"` or `"lora"`.
        created (`str`):
            Time of registration, ISO 8601, UTC.
        ram_trl_version (`str`):
            Version of this package that wrote it.
        base_model ([`BaseRecord`]):
            Its base model.
        snapshot ([`SnapshotRecord`]):
            What was stored.
        training (`dict`):
            Where it comes from: trainer, steps, last metrics, library versions.
        files (`dict[str, FileRecord]`):
            Every other file of the version.
        format_version (`int`):
            Version of the format.
    """

    agent: str
    kind: str
    created: str
    ram_trl_version: str
    base_model: BaseRecord
    snapshot: SnapshotRecord
    training: dict[str, Any] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def density(self) -> float | None:
        """Share of the base's parameters that the agent changed, as stored; unknown of a LoRA agent."""
        changed = self.snapshot.changed
        return None if changed is None else changed / max(1, self.base_model.total_parameters)

    def to_dict(self) -> dict[str, Any]:
        """As it is written, with a digest over itself."""
        return _seal(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, content: dict[str, Any], where: str) -> "Manifest":
        """Read back what [`to_dict`] gave; `where` names the file in errors."""
        return _from_dict(cls, content, where)


@dataclass(kw_only=True, slots=True)
class ParentRecord(Record):
    """An agent that a generalist was merged of; `digest` is that of its manifest."""

    agent: str
    version: int
    digest: str


@dataclass(kw_only=True, slots=True)
class GeneralistManifest(Record):
    """All that is recorded of one version of a generalist.

    Args:
        generalist (`str`):
            Name of the generalist. The version is the name of its directory.
        created (`str`):
            Time of the merge, ISO 8601, UTC.
        ram_trl_version (`str`):
            Version of this package that wrote it.
        base_model ([`BaseRecord`]):
            Base model of its agents.
        parents (`list[ParentRecord]`):
            The agents that it was merged of.
        settings (`dict`):
            How they were merged.
        gate (`str`, *optional*):
            Name of the function that judged it, if one did.
        refused (`str`, *optional*):
            Why the gate refused it.
        files (`dict[str, FileRecord]`):
            Every other file of the version.
        format_version (`int`):
            Version of the format.
    """

    generalist: str
    created: str
    ram_trl_version: str
    base_model: BaseRecord
    parents: list[ParentRecord]
    settings: dict[str, Any]
    gate: str | None = None
    refused: str | None = None
    files: dict[str, FileRecord] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def to_dict(self) -> dict[str, Any]:
        """As it is written, with a digest over itself."""
        return _seal(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, content: dict[str, Any], where: str) -> "GeneralistManifest":
        """Read back what [`to_dict`] gave; `where` names the file in errors."""
        return _from_dict(cls, content, where)


_NESTED: dict[str, Callable[[Any], Any]] = {
    "base_model": lambda record: BaseRecord(**record),
    "snapshot": lambda record: SnapshotRecord(**record),
    "parents": lambda records: [ParentRecord(**record) for record in records],
    "files": lambda records: {name: FileRecord(**record) for name, record in records.items()},
}


def _from_dict(manifest_class: type, content: dict[str, Any], where: str) -> Any:
    """A manifest from its sealed fields; what fields of other types raise becomes an error that names the file."""
    content = _unseal(content, manifest_class, where)
    try:
        nested = {name: _NESTED[name](value) for name, value in content.items() if name in _NESTED}
        return manifest_class(**{**content, **nested})
    except (TypeError, KeyError, AttributeError) as error:
        raise CorruptedFileError(f"{where} is not a manifest: {error}") from error


def _seal(content: dict[str, Any]) -> dict[str, Any]:
    """A manifest's fields with a digest over them."""
    return {**content, "digest": _digest(content)}


def _unseal(content: dict[str, Any], manifest_class: type, where: str) -> dict[str, Any]:
    """Check a manifest's format version, digest and fields.

    Raises:
        CorruptedFileError: if it is not what was written.
        UnsupportedModelError: if a newer version of this package wrote it.
    """
    version = content.get("format_version")
    if type(version) is not int or version < 1:
        raise CorruptedFileError(f"{where} is not a manifest: its format_version is {version!r}")
    if version > FORMAT_VERSION:
        raise UnsupportedModelError(
            f"{where} has format version {version}, this ram_trl reads up to {FORMAT_VERSION}: "
            "pip install --upgrade ram_trl"
        )
    content = dict(content)
    if "digest" not in content:
        raise CorruptedFileError(f"{where} has no digest: it was not written by ram_trl")
    if content.pop("digest") != _digest(content):
        raise CorruptedFileError(f"{where} is not what was registered: its digest differs")
    if missing := sorted({field.name for field in dataclasses.fields(manifest_class)} - set(content)):
        raise CorruptedFileError(f"{where} is not a manifest: it lacks {', '.join(missing)}")
    return content


def _digest(content: dict[str, Any]) -> str:
    """BLAKE3 over the fields as JSON, sorted by name."""
    return blake3(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
