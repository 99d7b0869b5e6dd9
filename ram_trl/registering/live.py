"""Registering an agent that is in memory, at the end of its training: all ranks take part, rank 0 writes.

Every rank walks over the parameters in the same order and helps to gather those that are sharded. If rank 0 fails on
the way, all learn of it before the next parameter.
"""

import contextlib
import functools
import logging
import shutil
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from ..arithmetic.codec import DTYPE_OPTIONS
from ..distributed import World, all_cores
from ..errors import IncompatibleAgentError, StorageError
from ..progress import Progress
from ..sharded import is_sharded, reserve_parameter, stream_parameter
from ..storage.checkpoint import OUTPUT_HEAD, Checkpoint
from ..storage.manifest import Manifest
from ..storage.registry import AgentRegistry, RegisteredAgent
from ..storage.tensor_file import PIECE_NUMEL
from .checks import check_tensors
from .initial_factors import find_initial_factors, save_initial_factors, takes_out_of_base
from .live_adapter import (
    adapter_shapes,
    check_adapter,
    check_memory,
    check_vocabulary,
    gather_adapter,
    live_features,
    snapshot_adapter,
)
from .live_merged import check_merged, merged_numel, snapshot_merged
from .live_model import (
    base_name,
    base_tensors,
    check_backend,
    full_shapes,
    has_trained_head,
    named_tensors,
    on_meta,
    reshard,
    unconverted_names,
    unwrap,
)
from .records import build_manifest
from .snapshot import AgentTensor, FullSnapshot


__all__ = ["LiveRegistration"]

logger = logging.getLogger(__name__)

# Bytes for each parameter that a snapshot may take (docs/FORMAT.md, sizes): 16-bit weights come down to a fifth, less
# where most of them changed; float32 differences hardly shrink.
_BYTES_OF_16, _BYTES_OF_32 = 0.6, 2.5


@dataclass(kw_only=True, slots=True)
class LiveRegistration:
    """What to register from a training run, and where.

    Args:
        registry ([`AgentRegistry`]):
            The registry.
        agent (`str`):
            Name of the agent.
        base_model (`str`, *optional*):
            Directory or Hub id of the base; by default what the model was loaded from.
        revision (`str`, *optional*):
            Revision of the base on the Hub.
        snapshot_dtype (`str`):
            `"auto"`, `"float32"`, `"bfloat16"` or `"float16"`.
        epsilon (`float`):
            Where values are stored in float32, changes of at most this size are not stored.
    """

    registry: AgentRegistry
    agent: str
    base_model: str | None
    revision: str | None
    snapshot_dtype: str
    epsilon: float
    # the base as it was when training began: a Hub repository may move on while it lasts
    opened: tuple[str, str | None] | None = field(default=None, init=False)
    # dtypes of the base's tensors, known from `check` on
    base_dtypes: set[torch.dtype] = field(default_factory=set, init=False)
    # what an adapter took out of the base's weights when it was made, on rank 0; known from `check` on
    initial: dict[str, Tensor] | None = field(default=None, init=False)

    def check(
        self,
        model: nn.Module,
        world: World,
        executed_in: torch.dtype | None = None,
        output_dir: str | None = None,
        is_fresh: bool = True,
    ) -> None:
        """Find before training what would fail after it. All ranks call it.

        Args:
            model (`nn.Module`):
                The model, sharded or not.
            world ([`~ram_trl.distributed.World`]):
                The processes of the run.
            executed_in (`torch.dtype`, *optional*):
                Dtype that the run computes in, if it is not that of its parameters.
            output_dir (`str`, *optional*):
                Where the run keeps what it needs when it is resumed.
            is_fresh (`bool`, *optional*, defaults to `True`):
                Whether the run begins now and is not resumed.

        Raises:
            RamTrlError: on all ranks.
        """
        world.run(lambda: check_backend(model))
        model = unwrap(model)
        reshard(model)
        is_first, self.opened = self.opened is None, None
        base = world.run(lambda: self._open_base(model))
        self.opened = (base.name, base.revision)
        folder = None if output_dir is None else Path(output_dir)
        self.initial = self._initial_factors(model, base, world, folder, is_fresh)
        world.run(lambda: self._check(model, base, world, executed_in))
        if isinstance(model, PeftModel) and is_fresh and is_first and not takes_out_of_base(model):
            # later, merging for vLLM may have left its rounding in the weights
            world.run(lambda: check_memory(model, base))
        is_kept = world.is_main and self.initial is not None and folder is not None
        world.run(lambda: save_initial_factors(self.initial, folder) if is_kept else None)

    def register(
        self,
        model: nn.Module,
        world: World,
        executed_in: torch.dtype | None,
        training: Mapping[str, Any],
        progress: Progress | None = None,
    ) -> RegisteredAgent | None:
        """Take the snapshot and commit it. All ranks call it.

        Args:
            model (`nn.Module`):
                The trained model, sharded or not.
            world ([`~ram_trl.distributed.World`]):
                The processes of the run.
            executed_in (`torch.dtype`, *optional*):
                Dtype that the run computed in, if it was not that of its parameters.
            training (`Mapping`):
                Where the agent comes from.
            progress (`Callable`, *optional*):
                Called on rank 0 with what is being done, how much is done and how much there is.

        Returns:
            [`RegisteredAgent`]: on rank 0 the new version, `None` elsewhere.

        Raises:
            RamTrlError: on all ranks.
        """
        model = unwrap(model)
        reshard(model)
        with contextlib.ExitStack() as stack:
            stack.enter_context(all_cores())
            base = world.run(lambda: self._open_base(model) if world.is_main else None)
            staged = world.run(lambda: stack.enter_context(self.registry.stage(self.agent)) if world.is_main else None)
            features = self._adapter_features(model)
            if features:
                dtype = DTYPE_OPTIONS[self.snapshot_dtype]
                manifest = snapshot_merged(model, base, staged, world, dtype, self.epsilon, features, progress)
            elif isinstance(model, PeftModel):
                manifest = snapshot_adapter(model, base, staged, world, self.initial, progress)
            else:
                manifest = self._snapshot_full(model, base, staged, world, executed_in, progress)

            def commit() -> RegisteredAgent:
                manifest.agent, manifest.training = self.agent, {**manifest.training, **training}
                return self.registry.commit(staged, manifest)

            return world.run(lambda: commit() if world.is_main else None)

    def _open_base(self, model: nn.Module) -> Checkpoint:
        base = Checkpoint.open(*(self.opened or (self.base_model or base_name(model), self.revision)))
        if isinstance(model, PeftModel):
            check_vocabulary(model, base)
        return base

    def _adapter_features(self, model: nn.Module) -> list[str]:
        return live_features(model, self.initial is not None) if isinstance(model, PeftModel) else []

    def _initial_factors(
        self, model: nn.Module, base: Checkpoint, world: World, folder: Path | None, is_fresh: bool
    ) -> dict[str, Tensor] | None:
        if not isinstance(model, PeftModel) or not takes_out_of_base(model):
            return None
        candidates = [self.initial] if self.initial else []
        if is_fresh:
            candidates.append(world.run(lambda: gather_adapter(model, keep=world.is_main)))
        shapes = adapter_shapes(model, *model.active_adapters)
        return find_initial_factors(model, base, world, shapes, candidates, folder)

    def _check(self, model: nn.Module, base: Checkpoint, world: World, executed_in: torch.dtype | None) -> None:
        self.base_dtypes = {info.dtype for info in base.tensors.values()}
        features = self._adapter_features(model)
        if features:
            check_merged(model, base, features)
        elif isinstance(model, PeftModel):
            check_adapter(model, base)
        else:
            check_tensors(full_shapes(model), base)
            if has_trained_head(model) and (OUTPUT_HEAD in base.tied or OUTPUT_HEAD not in base.tensors):
                raise IncompatibleAgentError(
                    f"the model trains its own {OUTPUT_HEAD!r}, which the base {base.name} ties to its embeddings: "
                    "untie the base, save it, and train from that"
                )
        if world.is_main:
            self.registry.check_writable()
            self._check_space(model, base, executed_in)

    def _snapshot_full(
        self,
        model: nn.Module,
        base: Checkpoint | None,
        staged: Path | None,
        world: World,
        executed_in: torch.dtype | None,
        progress: Progress | None,
    ) -> Manifest | None:
        dtype = self._rounded_to(executed_in)
        with contextlib.ExitStack() as stack:

            def start() -> FullSnapshot:
                return stack.enter_context(FullSnapshot(staged, base, dtype, self.epsilon))

            snapshot = world.run(lambda: start() if world.is_main else None)
            names = world.run(lambda: unconverted_names(model))
            error, done, total = None, 0, sum(on_meta(held).nbytes for _, held in named_tensors(model))
            for name, held in named_tensors(model):
                pieces = stream_parameter(held, PIECE_NUMEL, world) if name in names else None
                if pieces is None and is_sharded(held):
                    world.run(functools.partial(reserve_parameter, held))
                try:
                    if pieces is not None:
                        _add_stream(names[name], held, pieces, snapshot)
                    elif world.is_main or is_sharded(held):
                        _add_whole(model, name, held, snapshot)
                except Exception as caught:
                    error = caught
                # Tensor by tensor together: no rank waits so long that its backend gives up, all stop at a failure.
                if any(world.gather(error is not None)):
                    break
                done += on_meta(held).nbytes
                if world.is_main and progress:
                    progress(f"registering {self.agent}", done, total)
            world.agree(error)

            def finish() -> Manifest:
                records, record = snapshot.finish()
                return build_manifest("full", base, records, record)

            return world.run(lambda: finish() if world.is_main else None)

    def _rounded_to(self, executed_in: torch.dtype | None) -> torch.dtype | None:
        """The dtype that parameters are rounded to before they are stored, if any."""
        if self.snapshot_dtype == "auto" and executed_in in self.base_dtypes:
            return executed_in
        return DTYPE_OPTIONS[self.snapshot_dtype]

    def _check_space(self, model: nn.Module, base: Checkpoint, executed_in: torch.dtype | None) -> None:
        if self._adapter_features(model):
            is_16 = self.snapshot_dtype != "float32" and any(dtype.itemsize == 2 for dtype in self.base_dtypes)
            needed = int((_BYTES_OF_16 if is_16 else _BYTES_OF_32) * merged_numel(model))
        elif isinstance(model, PeftModel):
            needed = 4 * sum(on_meta(held).numel() for held in model.parameters() if held.requires_grad)
        else:
            [(most, _)] = Counter(held.dtype for _, held in named_tensors(model)).most_common(1)
            each = _BYTES_OF_16 if (self._rounded_to(executed_in) or most).itemsize == 2 else _BYTES_OF_32
            needed = int(each * sum(info.numel for info in base.tensors.values()))
        free = shutil.disk_usage(self.registry.path).free
        if free < needed:
            raise StorageError(
                f"the registry {self.registry.path} has {free / 1e9:.1f} GB of free space, a snapshot of this model "
                f"may take {needed / 1e9:.1f} GB: free some, or choose another place"
            )


def _add_stream(name: str, held: Tensor, pieces: Iterator[Tensor], snapshot: FullSnapshot | None) -> None:
    """Add one tensor as its pieces come, on the rank that has the snapshot."""

    def read(start: int, stop: int) -> Tensor:
        # the next piece comes into the same memory, while threads work on this one
        return next(pieces).to("cpu", copy=True)

    try:
        if snapshot is not None:
            snapshot.add(AgentTensor(name, held.dtype, tuple(on_meta(held).shape), read, is_stream=True))
    finally:
        # the other ranks send all of them, come what may
        deque(pieces, maxlen=0)


def _add_whole(model: nn.Module, name: str, held: Tensor, snapshot: FullSnapshot | None) -> None:
    """Add one tensor on the rank that has the snapshot. With this function end the references to what was gathered."""
    with base_tensors(model, name, held) as tensors:
        if snapshot is not None:
            for key, tensor in tensors.items():
                snapshot.add(AgentTensor.of(key, tensor))
            # a copy, of shards or from a GPU, is given back before the next is made
            if is_sharded(held) or not held.is_cpu:
                snapshot.flush()
