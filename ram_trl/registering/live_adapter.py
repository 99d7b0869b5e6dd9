"""The adapter of a model in training: what PEFT's layers hold of it now, and its snapshot."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.lora import Embedding, Linear, LoraLayer
from safetensors.torch import save_file
from torch import Tensor

from ..distributed import World, full_parameter
from ..errors import UnsupportedModelError
from ..progress import Progress
from ..storage.checkpoint import Checkpoint
from ..storage.manifest import Manifest
from ..storage.registry import ADAPTER
from .adapter import PREFIX, AdapterLayer, check_adapter_config, map_adapter
from .checks import check_finite
from .live_model import on_meta, strip_wrappers
from .register import write_lora_records


__all__ = ["check_adapter", "snapshot_adapter"]


def check_adapter(model: PeftModel, base: Checkpoint) -> None:
    """Find before training what [`snapshot_adapter`] would refuse; gathers nothing.

    Raises:
        UnsupportedModelError: if the adapter is not a plain LoRA, or more than it is trained.
        IncompatibleAgentError: if it does not fit the base.
    """
    adapter = _adapter_name(model)
    config = model.peft_config[adapter].to_dict()
    check_adapter_config(config)
    _check_trained(model, adapter)
    map_adapter(_adapter_shapes(model, adapter), config, base, _adapter_layers(model, adapter))


def snapshot_adapter(
    model: PeftModel, base: Checkpoint | None, staged: Path | None, world: World, progress: Progress | None
) -> Manifest | None:
    """Write an adapter, as it is now, into a staged directory. All ranks call it.

    Args:
        model (`PeftModel`):
            The model in training, sharded or not.
        base ([`~ram_trl.storage.checkpoint.Checkpoint`], *optional*):
            Base model; needed on rank 0.
        staged (`Path`, *optional*):
            Directory to write in; needed on rank 0.
        world ([`~ram_trl.distributed.World`]):
            The processes of the run.
        progress (`Callable`, *optional*):
            Called on rank 0 with what is being done, the bytes done and the bytes to do.

    Returns:
        [`~ram_trl.storage.manifest.Manifest`]: on rank 0, `None` elsewhere.

    Raises:
        RamTrlError: on all ranks.
    """
    adapter = world.run(lambda: _adapter_name(model))
    world.run(lambda: _check_trained(model, adapter))
    state = world.run(lambda: _gather_adapter(model, adapter, keep=world.is_main))
    config = model.peft_config[adapter]

    def write() -> Manifest:
        for name, tensor in state.items():
            check_finite(name, tensor)
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        lora = map_adapter(shapes, config.to_dict(), base, _adapter_layers(model, adapter))
        _save_adapter(staged, config, state, base.name)
        return write_lora_records(staged, base, lora, next(iter(state.values())).dtype, progress)

    return world.run(lambda: write() if world.is_main else None)


def _adapter_name(model: PeftModel) -> str:
    """The adapter that is trained. (TRL's frozen reference policy "ref" is not active.)

    Raises:
        UnsupportedModelError: if several are.
    """
    names = model.active_adapters
    if len(names) != 1:
        raise UnsupportedModelError(f"one active adapter is supported, this model has {len(names)}: {names}")
    return names[0]


def _check_trained(model: PeftModel, adapter: str) -> None:
    """Refuse a model of which more than the adapter is trained.

    Raises:
        UnsupportedModelError: naming the first such parameter.
    """
    saved = {id(held) for held in _adapter_state(model, adapter, lambda held: held).values()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in saved:
            raise UnsupportedModelError(
                f"parameter {name!r} is trained but is no part of the adapter: add its module to modules_to_save"
            )


def _adapter_shapes(model: PeftModel, adapter: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that PEFT would save; gathers nothing."""
    return {name: tuple(tensor.shape) for name, tensor in _adapter_state(model, adapter, on_meta).items()}


def _adapter_layers(model: PeftModel, adapter: str) -> dict[str, AdapterLayer]:
    """What PEFT's layers hold about an adapter now, by the base's module names."""
    return {
        strip_wrappers(name).removeprefix(PREFIX): AdapterLayer(
            scaling=float(module.scaling[adapter]),
            # PEFT's configuration holds this of the last layer only
            transposed=isinstance(module, Embedding) or (isinstance(module, Linear) and module.fan_in_fan_out),
        )
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer) and adapter in module.scaling
    }


def _gather_adapter(model: PeftModel, adapter: str, keep: bool) -> dict[str, Tensor]:
    """The tensors that PEFT would save, whole. All ranks call it alike.

    Args:
        model (`PeftModel`):
            The model.
        adapter (`str`):
            Name of the adapter.
        keep (`bool`):
            Whether this rank wants them, on the CPU; else it only helps to gather.
    """

    def whole(held: Tensor) -> Tensor:
        with full_parameter(held) as tensor:
            return tensor.cpu().clone().contiguous() if keep else on_meta(held)

    return _adapter_state(model, adapter, whole)


def _save_adapter(staged: Path, config: PeftConfig, state: dict[str, Tensor], base: str) -> None:
    """Write an adapter as PEFT does."""
    config = copy.copy(config)
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or base
    config.save_pretrained(staged)
    save_file(state, staged / ADAPTER, metadata={"format": "pt"})


def _adapter_state(model: PeftModel, adapter: str, take: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """PEFT's state dict of an adapter, `take` applied to each held parameter."""
    state: dict[str, Any] = {
        strip_wrappers(name): take(parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or "lora_" in name or "modules_to_save" in name
    }
    return get_peft_model_state_dict(model, state, adapter_name=adapter, save_embedding_layers=False)
