"""A model in training, seen as files would show it: names, shapes, one whole tensor at a time."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.lora import Embedding, Linear, LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers.core_model_loading import revert_weight_conversion

from ..distributed import full_parameter, is_sharded
from ..errors import UnsupportedModelError
from ..storage.checkpoint import OUTPUT_HEAD
from ..storage.registry import ADAPTER
from .adapter import PREFIX, AdapterLayer


__all__ = [
    "adapter_layers",
    "adapter_name",
    "adapter_shapes",
    "base_name",
    "base_tensors",
    "check_backend",
    "check_trained",
    "full_shapes",
    "gather_adapter",
    "has_trained_head",
    "named_tensors",
    "save_adapter",
    "unwrap",
]

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def check_backend(model: nn.Module) -> None:
    """Refuse models whose parameters cannot be had one at a time.

    Raises:
        UnsupportedModelError: for FSDP1.
    """
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise UnsupportedModelError(
            "FSDP1 flattens parameters: use FSDP2 (fsdp_version: 2 in the accelerate configuration), or drop the "
            "callback and register the saved model with ram-trl register"
        )


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside of torch.compile and data parallelism."""
    return extract_model_from_parallel(model, keep_torch_compile=False)


def base_name(model: nn.Module) -> str:
    """Directory or Hub id that the model was loaded from; empty if it was made from a configuration."""
    return (model.get_base_model() if isinstance(model, PeftModel) else model).config.name_or_path or ""


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers of a full model, tied ones once, as they are held (perhaps sharded)."""
    transient = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    yield from ((_strip_wrappers(name), parameter) for name, parameter in model.named_parameters())
    yield from ((_strip_wrappers(name), buffer) for name, buffer in model.named_buffers() if name not in transient)


@contextmanager
def base_tensors(model: nn.Module, name: str, held: Tensor) -> Iterator[Mapping[str, Tensor]]:
    """One held tensor, whole, under the names that files use: several for fused experts. All ranks call it alike."""
    with full_parameter(held) as tensor:
        yield revert_weight_conversion(model, {name: tensor})


def full_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of a full model's tensors under the names that files use; gathers nothing."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, held in named_tensors(model):
        converted = revert_weight_conversion(model, {name: _on_meta(held)})
        shapes.update({key: tuple(value.shape) for key, value in converted.items()})
    return shapes


def has_trained_head(model: nn.Module) -> bool:
    """Whether an output head is trained that is not tied to the embeddings."""
    return any(name == OUTPUT_HEAD and held.requires_grad for name, held in named_tensors(model))


def adapter_name(model: PeftModel) -> str:
    """The adapter that is trained. (TRL's frozen reference policy "ref" is not active.)

    Raises:
        UnsupportedModelError: if several are.
    """
    names = model.active_adapters
    if len(names) != 1:
        raise UnsupportedModelError(f"one active adapter is supported, this model has {len(names)}: {names}")
    return names[0]


def check_trained(model: PeftModel, adapter: str) -> None:
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


def adapter_shapes(model: PeftModel, adapter: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that PEFT would save; gathers nothing."""
    return {name: tuple(tensor.shape) for name, tensor in _adapter_state(model, adapter, _on_meta).items()}


def adapter_layers(model: PeftModel, adapter: str) -> dict[str, AdapterLayer]:
    """What PEFT's layers hold about an adapter now, by the base's module names."""
    return {
        _strip_wrappers(name).removeprefix(PREFIX): AdapterLayer(
            scaling=float(module.scaling[adapter]),
            # PEFT's configuration holds this of the last layer only
            transposed=isinstance(module, Embedding) or (isinstance(module, Linear) and module.fan_in_fan_out),
        )
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer) and adapter in module.scaling
    }


def gather_adapter(model: PeftModel, adapter: str, keep: bool) -> dict[str, Tensor]:
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
            return tensor.cpu().clone().contiguous() if keep else _on_meta(held)

    return _adapter_state(model, adapter, whole)


def save_adapter(staged: Path, config: PeftConfig, state: dict[str, Tensor], base: str) -> None:
    """Write an adapter as PEFT does."""
    config = copy.copy(config)
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or base
    config.save_pretrained(staged)
    save_file(state, staged / ADAPTER, metadata={"format": "pt"})


def _adapter_state(model: PeftModel, adapter: str, take: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """PEFT's state dict of an adapter, `take` applied to each held parameter."""
    state: dict[str, Any] = {
        _strip_wrappers(name): take(parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or "lora_" in name or "modules_to_save" in name
    }
    return get_peft_model_state_dict(model, state, adapter_name=adapter, save_embedding_layers=False)


def _strip_wrappers(name: str) -> str:
    """Name of a parameter without what data parallelism, checkpointing and torch.compile put into it."""
    name = name.removeprefix("module.")
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
    return name


def _on_meta(held: Tensor) -> Tensor:
    """A tensor of the same shape without contents. ZeRO-3 empties a parameter and keeps its shape aside."""
    shape = held.ds_shape if is_sharded(held) and hasattr(held, "ds_shape") else held.shape
    return torch.empty(shape, dtype=held.dtype, device="meta")
