"""A model in training, seen as the files of its base would show it: names, shapes, one whole tensor at a time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..distributed import full_parameter


__all__ = ["base_tensors", "disk_shapes", "lora_scaling", "strip_wrappers"]

_WRAPPERS = ("module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def strip_wrappers(name: str) -> str:
    """Name of a parameter without what data parallelism, checkpointing and torch.compile put into it."""
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
    return name


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, tied ones once, as they are held (perhaps sharded)."""
    yield from ((strip_wrappers(name), parameter) for name, parameter in model.named_parameters())
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    for name, buffer in model.named_buffers():
        if name not in transient:
            yield strip_wrappers(name), buffer


@contextmanager
def base_tensors(model: nn.Module, name: str, held: Tensor) -> Iterator[Mapping[str, Tensor]]:
    """One held tensor, whole, under the names that files use: several for fused experts. All ranks call it alike."""
    with full_parameter(held) as tensor:
        yield _revert_conversion(model, {name: tensor})


def disk_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's tensors under the names that files use; computes and gathers nothing."""
    shapes = {}
    for name, held in named_tensors(model):
        # ZeRO-3 empties a parameter and keeps its shape aside
        shape = held.ds_shape if hasattr(held, "ds_shape") else held.shape
        meta = torch.empty(shape, dtype=held.dtype, device="meta")
        shapes.update({key: tuple(value.shape) for key, value in _revert_conversion(model, {name: meta}).items()})
    return shapes


def lora_scaling(model: nn.Module, adapter: str) -> dict[str, float]:
    """Scaling of an adapter in every LoRA layer, by the base's module names, as the layers hold it now."""
    from peft.tuners.lora import LoraLayer

    return {
        strip_wrappers(name).removeprefix("base_model.model."): float(module.scaling[adapter])
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer) and adapter in module.scaling
    }


def _revert_conversion(model: nn.Module, tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
    # transformers loads the experts of a mixture fused, its files hold them one by one
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)
