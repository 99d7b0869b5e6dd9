"""Floor 2, the only place where arithmetic meets storage: a registered agent as a source of changes, in tiles.

A full fine-tune and a LoRA adapter look the same from here: [`open_task_vector`] gives an object that knows which
tensors the agent changed and what it makes of any tile of them.
"""

import functools
import itertools
from enum import IntEnum

import numpy as np
from torch import Tensor

from .arithmetic.codec import TILE_NUMEL, EncodedLayer, Layer, apply_layers, is_finite, unpack_layers
from .arithmetic.defaults import DEFAULT_EPSILON
from .arithmetic.lora import LoraFactors, lora_delta, visible_delta
from .arithmetic.masks import decode_mask, pack_bits
from .arithmetic.ram import TileUpdate
from .arithmetic.tile import PackedUpdate
from .errors import CorruptedFileError, NonFiniteError
from .storage.manifest import LoraRecord
from .storage.registry import RegisteredAgent
from .storage.tensor_file import DTYPES, TensorFile
from .threads import Scratch


__all__ = ["DELTA_PREFIX", "ENDS_PREFIX", "FullTaskVector", "LoraTaskVector", "TaskVector", "open_task_vector"]

# Names in delta.safetensors: the encoded tiles of a tensor, and where each part of each tile ends.
DELTA_PREFIX, ENDS_PREFIX = "delta/", "ends/"


class _Part(IntEnum):
    """What a tile in delta.safetensors consists of, in this order."""

    LARGE_MASK = 0
    LARGE_CODES = 1
    SMALL_MASK = 2
    SMALL_CODES = 3


class TaskVector:
    """What one agent changed. Subclasses say how it is stored.

    Args:
        agent ([`~ram_trl.storage.registry.RegisteredAgent`]):
            The agent.
    """

    def __init__(self, agent: RegisteredAgent):
        self.agent = agent
        self._file: TensorFile = agent.open_weights()

    def close(self) -> None:
        self._file.close()

    def check_unchanged(self) -> None:
        """Refuse a file that was written to since it was opened."""
        self._file.check_unchanged()

    @property
    def changed_tensors(self) -> set[str]:
        """Names of the base's tensors in which the agent has a delta."""
        raise NotImplementedError

    def stores_masks(self, epsilon: float) -> bool:
        """Whether [`mask`] for this epsilon is stored, and needs no base."""
        return False

    def mask(self, name: str, start: int, numel: int, base: Tensor | None, epsilon: float) -> np.ndarray | None:
        """Mask of equation 1 of one tile.

        Args:
            name (`str`):
                A tensor among [`changed_tensors`].
            start (`int`):
                Index of the tile's first element in the flattened tensor, a multiple of `TILE_NUMEL`.
            numel (`int`):
                Number of elements of the tile.
            base (`Tensor`, *optional*):
                The tile of the base model, in the base's dtype, flat, on the CPU; needed unless [`stores_masks`].
            epsilon (`float`):
                Threshold.

        Returns:
            `np.ndarray`: bitmap, uint8, valid until this thread asks for the agent's next tile; `None` if nothing is
            changed in the tile.

        Raises:
            NonFiniteError: if the agent has NaN or infinity there, and the values were read.
        """
        update = self.update(0, name, start, base)
        if update is None:
            return None
        if not is_finite(update.delta):
            raise self.diverged(name)
        return pack_bits((update.delta.abs() > epsilon).numpy())

    def update(self, position: int, name: str, start: int, base: Tensor, epsilon: float = 0.0) -> TileUpdate | None:
        """The agent's parameters in one tile.

        Args:
            position (`int`):
                Position of the agent in the merge.
            name (`str`):
                A tensor among [`changed_tensors`].
            start (`int`):
                Index of the tile's first element in the flattened tensor, a multiple of `TILE_NUMEL`.
            base (`Tensor`):
                The tile of the base model, in the base's dtype, flat, on the CPU.
            epsilon (`float`, *optional*, defaults to `0.0`):
                Changes of at most this size may be left out.

        Returns:
            [`~ram_trl.arithmetic.ram.TileUpdate`], on the CPU, valid until this thread asks for the agent's next tile,
            or `None` if nothing is changed in the tile.
        """
        raise NotImplementedError

    def packed_update(
        self, position: int, name: str, start: int, base: Tensor, epsilon: float
    ) -> PackedUpdate | TileUpdate | None:
        """What [`update`] gives, as it is stored if the compiled loops can read that."""
        return self.update(position, name, start, base, epsilon)

    def agent_tile(self, name: str, start: int, base: Tensor) -> Tensor | None:
        """The agent's own values in one tile, to restore it, or `None` for the base's. Arguments as [`update`]."""
        raise NotImplementedError

    def diverged(self, name: str) -> NonFiniteError:
        """The error to raise when the agent is not finite in a tensor."""
        return NonFiniteError(f"agent {self.agent} holds NaN or infinity in tensor {name!r}: its training diverged")


class FullTaskVector(TaskVector):
    """A full fine-tune: differences from the base, tile by tile."""

    def __init__(self, agent: RegisteredAgent):
        super().__init__(agent)
        self._ends: dict[str, np.ndarray] = {}
        self._scratch = Scratch()
        self._records = {name: record for name, record in agent.tensors().items() if record.stored is not None}
        for name, record in self._records.items():
            if record.stored not in (record.dtype, "F32"):
                raise CorruptedFileError(f"agent {agent}: {name!r} is stored as {record.stored} over {record.dtype}")
        tiles = {key.removeprefix(DELTA_PREFIX) for key in self._file.tensors if key.startswith(DELTA_PREFIX)}
        if tiles != set(self._records):
            raise CorruptedFileError(
                f"agent {agent} does not hold the tensors that it records; if it was registered before 0.1.0 was "
                "released, register it again"
            )
        self._dtypes = {name: DTYPES[record.stored] for name, record in self._records.items()}

    @property
    def changed_tensors(self) -> set[str]:
        return set(self._records)

    def stores_masks(self, epsilon: float) -> bool:
        return epsilon == DEFAULT_EPSILON

    def mask(self, name: str, start: int, numel: int, base: Tensor | None, epsilon: float) -> np.ndarray | None:
        if not self.stores_masks(epsilon):
            return super().mask(name, start, numel, base, epsilon)
        data = self._read(name, start, _Part.LARGE_MASK, _Part.LARGE_MASK)[0]
        return decode_mask(data, numel) if data else None

    def update(self, position: int, name: str, start: int, base: Tensor, epsilon: float = 0.0) -> TileUpdate | None:
        layers = self._layers(name, start, base.numel(), epsilon)
        if not layers:
            return None
        return TileUpdate(position, *unpack_layers(base, layers, self._dtypes[name], self._scratch))

    def packed_update(
        self, position: int, name: str, start: int, base: Tensor, epsilon: float
    ) -> PackedUpdate | TileUpdate | None:
        if self._dtypes[name].itemsize != 2:
            return self.update(position, name, start, base, epsilon)
        layers = self._layers(name, start, base.numel(), epsilon)
        return PackedUpdate(position, layers) if layers else None

    def agent_tile(self, name: str, start: int, base: Tensor) -> Tensor | None:
        layers = self._layers(name, start, base.numel(), 0.0)
        return apply_layers(base, layers, self._dtypes[name]) if layers else None

    def _layers(self, name: str, start: int, numel: int, epsilon: float) -> list[Layer]:
        """The layers that are not empty, valid until this thread reads the next tile.

        That of the small changes is left out where a merge with this epsilon does not look at it.
        """
        itemsize = self._dtypes[name].itemsize
        last = _Part.LARGE_CODES if epsilon >= DEFAULT_EPSILON and itemsize == 2 else _Part.SMALL_CODES
        parts = self._read(name, start, _Part.LARGE_MASK, last)
        encoded = [EncodedLayer(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
        return [layer.decode(numel, itemsize) for layer in encoded if layer.mask]

    def _read(self, name: str, start: int, first: _Part, last: _Part) -> list[memoryview]:
        """Some successive parts of a tile, valid until this thread reads the next."""
        ends = self._tile_ends(name)
        index = start // TILE_NUMEL * len(_Part) + first
        bounds = ends[index : index + last - first + 2].tolist()
        data = self._scratch.take(bounds[-1] - bounds[0])
        self._file.read_into(self._file.tensors[DELTA_PREFIX + name].offset + bounds[0], data)
        view = memoryview(data)
        return [view[begin - bounds[0] : end - bounds[0]] for begin, end in itertools.pairwise(bounds)]

    def _tile_ends(self, name: str) -> np.ndarray:
        """Where the parts of all tiles begin and end, one after another."""
        ends = self._ends.get(name)
        if ends is None:
            tiles, infos = DELTA_PREFIX + name, self._file.tensors
            stored = self._file.read(ENDS_PREFIX + name).tolist() if ENDS_PREFIX + name in infos else []
            ends = np.array([0, *stored])
            num_tiles = -(-self._records[name].numel // TILE_NUMEL)
            is_fit = len(ends) == 1 + num_tiles * len(_Part) and ends.dtype == np.int64
            if not is_fit or (ends[1:] < ends[:-1]).any() or ends[-1] != infos[tiles].nbytes:
                raise CorruptedFileError(f"agent {self.agent}: tensor {name!r} has tiles outside its bytes")
            self._ends[name] = ends
        return ends


class LoraTaskVector(TaskVector):
    """A PEFT LoRA adapter, and modules that were trained in full beside it.

    A delta counts where it is visible in the base's dtype, because that is what deployment executes.
    """

    def __init__(self, agent: RegisteredAgent):
        super().__init__(agent)
        self._map, records = agent.adapter_map(), agent.tensors()
        for name, record in self._map.items():
            if name not in records or self._shape_of(record) != tuple(records[name].shape):
                raise CorruptedFileError(f"agent {agent} has no factors that make a delta of the shape of {name!r}")
        # tiles of one tensor come one after another
        self._factors_of = functools.lru_cache(maxsize=8)(self._read_factors)

    @property
    def changed_tensors(self) -> set[str]:
        return set(self._map)

    def update(self, position: int, name: str, start: int, base: Tensor, epsilon: float = 0.0) -> TileUpdate | None:
        stop = start + base.numel()
        replaced_by = self._map[name].replaced_by
        if replaced_by is not None:
            value = self._file.read(replaced_by, start, stop).float()
            delta = visible_delta(value - base.float(), base)
        else:
            delta = visible_delta(lora_delta(self._factors_of(name), start, stop), base)
            value = base.float() + delta
        return TileUpdate(position, value, delta)

    def agent_tile(self, name: str, start: int, base: Tensor) -> Tensor:
        return self.update(0, name, start, base).value.to(base.dtype)

    def _shape_of(self, record: LoraRecord) -> tuple[int, ...] | None:
        """Shape of the tensor that the factors of a record make, if they make one."""
        infos = self._file.tensors
        if record.replaced_by is not None:
            return infos[record.replaced_by].shape if record.replaced_by in infos else None
        shapes = [infos[key].shape if key in infos else () for key in (record.factor_a, record.factor_b)]
        (rank, columns), (rows, width) = (shape if len(shape) == 2 else (0, 0) for shape in shapes)
        if rank != width or rank == 0:
            return None
        return (columns, rows) if record.transposed else (rows, columns)

    def _read_factors(self, name: str) -> LoraFactors:
        record = self._map[name]
        factor_a, factor_b = (
            self._file.read(key).view(self._file.tensors[key].shape) for key in (record.factor_a, record.factor_b)
        )
        return LoraFactors.from_peft(factor_a, factor_b, record.scaling, record.transposed)


def open_task_vector(agent: RegisteredAgent) -> TaskVector:
    """Open an agent of either kind."""
    return FullTaskVector(agent) if agent.manifest.kind == "full" else LoraTaskVector(agent)
