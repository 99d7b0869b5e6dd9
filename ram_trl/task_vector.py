"""Floor 2, the only place where arithmetic meets storage: a registered agent as a source of float32 deltas, in tiles.

A full fine-tune and a LoRA adapter look the same from here: [`open_task_vector`] gives an object that knows which
tensors the agent changed and what it makes of any tile of them.
"""

import functools

from torch import Tensor

from .arithmetic.codec import FRAME_NUMEL, decode_frame
from .arithmetic.lora import LoraFactors, lora_delta, visible_delta
from .arithmetic.ram import TileUpdate
from .errors import CorruptedFileError, NonFiniteError
from .storage.registry import RegisteredAgent
from .storage.tensor_file import DTYPES, TensorFile


__all__ = ["CODES", "FRAMES", "TILE_NUMEL", "FullTaskVector", "LoraTaskVector", "TaskVector", "open_task_vector"]

# Names in delta.safetensors: the frames of a tensor, and where each of them ends.
CODES, FRAMES = "codes/", "frames/"

# A tile is one frame of the codec, for every agent and device: results do not depend on how work is shared out.
TILE_NUMEL = FRAME_NUMEL


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

    def tile(self, position: int, name: str, start: int, base: Tensor) -> TileUpdate | None:
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

        Returns:
            [`~ram_trl.arithmetic.ram.TileUpdate`], on the CPU, or `None` if nothing is changed in the tile.

        Raises:
            NonFiniteError: if the agent has NaN or infinity there.
        """
        raise NotImplementedError

    def agent_tile(self, name: str, start: int, base: Tensor) -> Tensor | None:
        """The agent's own values in one tile, to restore it; `None` if they are the base's. Arguments as [`tile`]."""
        raise NotImplementedError

    def _update(self, position: int, name: str, value: Tensor, delta: Tensor) -> TileUpdate:
        # The largest magnitude is NaN or infinite if any element is: one pass.
        if not delta.abs().amax().isfinite():
            raise NonFiniteError(f"agent {self.agent} holds NaN or infinity in tensor {name!r}: its training diverged")
        return TileUpdate(position, value, delta)


class FullTaskVector(TaskVector):
    """A full fine-tune: ULP differences from the base, in frames."""

    def __init__(self, agent: RegisteredAgent):
        super().__init__(agent)
        self._ends: dict[str, list[int]] = {}
        self._stored_dtypes = {
            name: DTYPES[record.stored] for name, record in agent.tensors().items() if record.stored is not None
        }

    @property
    def changed_tensors(self) -> set[str]:
        return set(self._stored_dtypes)

    def tile(self, position: int, name: str, start: int, base: Tensor) -> TileUpdate | None:
        stored = self.agent_tile(name, start, base)
        if stored is None:
            return None
        value = stored.float()
        return self._update(position, name, value, value - base.float())

    def agent_tile(self, name: str, start: int, base: Tensor) -> Tensor | None:
        ends = self._ends.get(name)
        if ends is None:
            ends = self._ends[name] = self._file.read(FRAMES + name).tolist()
        frame_number, info = start // FRAME_NUMEL, self._file.tensors[CODES + name]
        begin, end = (ends[frame_number - 1] if frame_number else 0), ends[frame_number]
        if not 0 <= begin <= end <= info.nbytes:
            raise CorruptedFileError(f"agent {self.agent}: tensor {name!r} has frames outside its bytes")
        if begin == end:
            return None
        frame = bytes(self._file.read_bytes(info.offset + begin, end - begin))
        return decode_frame(frame, base.to(self._stored_dtypes[name]))


class LoraTaskVector(TaskVector):
    """A PEFT LoRA adapter, and modules that were trained in full beside it.

    A delta counts where it is visible in the base's dtype, because that is what deployment executes.
    """

    def __init__(self, agent: RegisteredAgent):
        super().__init__(agent)
        self._map = agent.adapter_map()
        # tiles of one tensor come one after another
        self._factors_of = functools.lru_cache(maxsize=8)(self._read_factors)

    @property
    def changed_tensors(self) -> set[str]:
        return set(self._map)

    def tile(self, position: int, name: str, start: int, base: Tensor) -> TileUpdate | None:
        stop = start + base.numel()
        replaced_by = self._map[name].replaced_by
        if replaced_by is not None:
            value = self._file.read(replaced_by, start, stop).float()
            delta = visible_delta(value - base.float(), base)
        else:
            delta = visible_delta(lora_delta(self._factors_of(name), start, stop), base)
            value = base.float() + delta
        return self._update(position, name, value, delta)

    def agent_tile(self, name: str, start: int, base: Tensor) -> Tensor:
        return self.tile(0, name, start, base).value.to(base.dtype)

    def _read_factors(self, name: str) -> LoraFactors:
        record = self._map[name]
        factor_a, factor_b = (
            self._file.read(key).view(self._file.tensors[key].shape) for key in (record.factor_a, record.factor_b)
        )
        return LoraFactors.from_peft(factor_a, factor_b, record.scaling, record.transposed)


def open_task_vector(agent: RegisteredAgent) -> TaskVector:
    """Open an agent of either kind."""
    return FullTaskVector(agent) if agent.manifest.kind == "full" else LoraTaskVector(agent)
