"""The adapter of a model in training that is no plain LoRA: registered as what PEFT's own merge makes of the base.

The layers of an adapter are merged one at a time, each in a copy, and compared with the base on disk.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from ..arithmetic.codec import is_mergeable
from ..distributed import World
from ..errors import UnsupportedModelError
from ..progress import Progress
from ..sharded import is_sharded
from ..storage.checkpoint import INPUT_EMBEDDINGS, OUTPUT_HEAD, Checkpoint
from ..storage.manifest import Manifest
from .adapter import INITIAL_FACTORS, TRAIN_LORA, check_mergeable, check_targets
from .checks import check_tensors
from .live_model import strip_wrappers
from .merged_layer import as_files, is_memory_the_base, merged_module
from .records import build_manifest
from .snapshot import AgentTensor, FullSnapshot


__all__ = ["check_merged", "merged_numel", "snapshot_merged"]


def check_merged(model: PeftModel, base: Checkpoint, features: list[str]) -> None:
    """Find before training what [`snapshot_merged`] would refuse; merges one layer of each kind.

    Args:
        model (`PeftModel`):
            The model in training.
        base ([`~ram_trl.storage.checkpoint.Checkpoint`]):
            Base model.
        features (`list[str]`):
            What makes the adapter something else than a plain LoRA.

    Raises:
        UnsupportedModelError: if the adapter cannot be merged into its model, or not here.
        IncompatibleAgentError: if it does not fit the base.
    """
    feature = ", ".join(features)
    for name in model.active_adapters:
        check_mergeable(model.peft_config[name].to_dict())
    is_from_memory = is_memory_the_base(model)
    for name, held in model.named_parameters():
        if is_sharded(held):
            raise UnsupportedModelError(
                f"{feature}: such an adapter is registered by merging it, and the parameters of this model are "
                "sharded: train with DDP or on one device, or register the saved adapter with ram-trl register"
            )
        if name.endswith("base_layer.weight") and not held.is_floating_point():
            raise UnsupportedModelError(
                f"{feature}: such an adapter is registered by merging it, which is not done over quantised weights "
                f"({name!r}): {TRAIN_LORA}"
            )
        if is_from_memory and name.endswith("base_layer.weight") and held.dtype != torch.float32:
            cure = f", or put {INITIAL_FACTORS} of the run that began with this adapter into output_dir"
            raise UnsupportedModelError(
                f"{feature} changed the base's weights in memory, which hold {held.dtype}: that rounding would be "
                f"taken for training; load the model in float32{cure if feature.startswith('init_') else ''}"
            )
    kinds = set()
    for path, module in _wrapped_modules(model):
        kind = (type(module), *(tuple(held.shape) for held in module.parameters()))
        if kind not in kinds:
            kinds.add(kind)
            merged = merged_module(model, path, module, base)
            check_tensors({name: tuple(tensor.shape) for name, tensor in merged.items()}, base)
    _check_ties(model, base)


def merged_numel(model: PeftModel) -> int:
    """At most so many parameters [`snapshot_merged`] finds changed."""
    held = {id(held): held for _, module in _wrapped_modules(model) for held in module.parameters()}
    held.update({id(parameter): parameter for _, parameter in _trained_beside(model)})
    return sum(parameter.numel() for parameter in held.values())


def snapshot_merged(
    model: PeftModel,
    base: Checkpoint | None,
    staged: Path | None,
    world: World,
    dtype: torch.dtype | None,
    epsilon: float,
    features: list[str],
    progress: Progress | None,
) -> Manifest | None:
    """Write what an adapter made of the base's tensors into a staged directory. All ranks call it.

    Args:
        model (`PeftModel`):
            The model in training, the same on every rank.
        base ([`~ram_trl.storage.checkpoint.Checkpoint`], *optional*):
            Base model; needed on rank 0.
        staged (`Path`, *optional*):
            Directory to write in; needed on rank 0.
        world ([`~ram_trl.distributed.World`]):
            The processes of the run.
        dtype (`torch.dtype`, *optional*):
            Dtype that merged tensors are rounded to where the base has it; by default the base's own.
        epsilon (`float`):
            Where values are stored in float32, changes of at most this size are not stored.
        features (`list[str]`):
            What makes the adapter something else than a plain LoRA.
        progress (`Callable`, *optional*):
            Called on rank 0 with what is being done, how much is done and how much there is.

    Returns:
        [`~ram_trl.storage.manifest.Manifest`]: on rank 0, `None` elsewhere.

    Raises:
        RamTrlError: on all ranks.
    """
    with contextlib.ExitStack() as stack:

        def start() -> FullSnapshot:
            return stack.enter_context(FullSnapshot(staged, base, dtype or _deployed_dtype(base), epsilon))

        snapshot, error = world.run(lambda: start() if world.is_main else None), None
        modules = list(_wrapped_modules(model))
        for done, (path, module) in enumerate(modules):
            if world.is_main:
                try:
                    _add(merged_module(model, path, module, base), base, snapshot)
                except Exception as caught:
                    error = caught
            # module by module together: no rank waits so long that its backend gives up, all stop at a failure
            if any(world.gather(error is not None)):
                break
            if world.is_main and progress:
                progress("merging the adapter", done + 1, len(modules))
        world.agree(error)

        def finish() -> Manifest:
            for name, parameter in _trained_beside(model):
                _add(as_files(model, {name: parameter.detach()}), base, snapshot)
            records, record = snapshot.finish(is_whole=False)
            manifest = build_manifest("full", base, records, record)
            types = {str(model.peft_config[name].peft_type).rpartition(".")[2] for name in model.active_adapters}
            manifest.training = {"adapter": {"type": "+".join(sorted(types)), "features": features}}
            return manifest

        return world.run(lambda: finish() if world.is_main else None)


def _add(tensors: Mapping[str, Tensor], base: Checkpoint, snapshot: FullSnapshot) -> None:
    for name, tensor in tensors.items():
        # a head that is tied changes with the embedding, as [`_check_ties`] made sure
        if name != OUTPUT_HEAD or not _is_tied(base):
            snapshot.add(AgentTensor.of(name, tensor))
    # one copy is given back before the next is made
    snapshot.flush()


def _deployed_dtype(base: Checkpoint) -> torch.dtype | None:
    """The dtype that most of the base has."""
    numel: dict[torch.dtype, int] = {}
    for info in base.tensors.values():
        if is_mergeable(info.dtype):
            numel[info.dtype] = numel.get(info.dtype, 0) + info.numel
    return max(numel, key=numel.get, default=None)


def _wrapped_modules(model: PeftModel) -> Iterator[tuple[str, nn.Module]]:
    """Modules that PEFT put into the place of the base's, by the base's names; not those inside of another."""

    def walk(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            if isinstance(child, BaseTunerLayer | AuxiliaryTrainingWrapper):
                yield strip_wrappers(f"{prefix}{name}"), child
            else:
                yield from walk(f"{prefix}{name}.", child)

    yield from walk("", model.get_base_model())


def _trained_beside(model: PeftModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters that are trained outside of all adapters, biases for instance, by the base's names."""
    inside = {id(held) for _, module in _wrapped_modules(model) for held in module.parameters()}
    for name, parameter in model.get_base_model().named_parameters():
        if parameter.requires_grad and id(parameter) not in inside:
            yield strip_wrappers(name), parameter


def _is_tied(base: Checkpoint) -> bool:
    return base.ties_embeddings and (bool(base.tied) or OUTPUT_HEAD not in base.tensors)


def _check_ties(model: PeftModel, base: Checkpoint) -> None:
    """Refuse an adapter that changes one of two tied tensors alone.

    Raises:
        UnsupportedModelError: naming the tensor.
    """
    modules = dict(_wrapped_modules(model))
    changed = {f"{path}.weight": module for path, module in modules.items()}
    changed.update({name: None for name, _ in _trained_beside(model) if name not in changed})
    embeddings = [name for name in changed if name.endswith(INPUT_EMBEDDINGS)]
    if _is_tied(base) and OUTPUT_HEAD in changed and len(embeddings) == 1:
        trained = [_trained_storages(changed[name]) for name in (OUTPUT_HEAD, *embeddings)]
        if trained[0] and trained[0] == trained[1]:
            return
    check_targets((name for name in changed if name in (OUTPUT_HEAD, *embeddings)), base)


def _trained_storages(module: nn.Module | None) -> set[int]:
    """Where the trained parameters of a module are: tied ones are views of the same memory."""
    parameters = module.parameters() if module is not None else ()
    return {held.untyped_storage().data_ptr() for held in parameters if held.requires_grad}
