"""A model in training, seen as files would show it: names, shapes, one whole tensor at a time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from accelerate.utils import extract_model_from_parallel
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ..errors import UnsupportedModelError
from ..sharded import full_parameter, is_sharded
from ..storage.checkpoint import OUTPUT_HEAD


__all__ = [
    "base_name",
    "base_tensors",
    "check_backend",
    "full_shapes",
    "has_trained_head",
    "named_tensors",
    "on_meta",
    "reshard",
    "strip_wrappers",
    "unconverted_names",
    "unwrap",
]

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def check_backend(model: nn.Module) -> None:
    """Refuse models whose parameters cannot be had one at a time.

    Raises:
        UnsupportedModelError: for FSDP1, and for an adapter of a model that transformers sharded as it loaded it.
    """
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise UnsupportedModelError(
            "FSDP1 flattens parameters: use FSDP2 (fsdp_version: 2 in the accelerate configuration), or drop the "
            "callback and register the saved model with ram-trl register"
        )
    # the older versions of transformers do not shard
    if isinstance(model, PeftModel) and getattr(
        model.get_base_model(), "is_distributed_loading_by_transformers", False
    ):
        raise UnsupportedModelError(
            "PEFT gathers all of an adapter at once if transformers sharded the model as it loaded it: shard it with "
            "accelerate instead of distributed_config (FSDP2, ZeRO-3), or drop the callback and register the saved "
            "adapter with ram-trl register"
        )


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside of torch.compile and data parallelism."""
    return extract_model_from_parallel(model, keep_torch_compile=False)


def reshard(model: nn.Module) -> None:
    """Have FSDP2 give back what it gathered for a forward pass: those copies are in the dtype of mixed precision."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def base_name(model: nn.Module) -> str:
    """Directory or Hub id that the model was loaded from; empty if it was not loaded."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    return inner.config.name_or_path or "" if isinstance(inner, PreTrainedModel) else ""


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers of a full model, tied ones once, as they are held (perhaps sharded)."""
    transient = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    yield from ((strip_wrappers(name), parameter) for name, parameter in model.named_parameters())
    yield from ((strip_wrappers(name), buffer) for name, buffer in model.named_buffers() if name not in transient)


@contextmanager
def base_tensors(model: nn.Module, name: str, held: Tensor) -> Iterator[Mapping[str, Tensor]]:
    """One held tensor, whole, under the names that files use: several for fused experts. All ranks call it alike."""
    with full_parameter(held) as tensor:
        yield revert_weight_conversion(model, {name: tensor})


def full_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of a full model's tensors under the names that files use; gathers nothing."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, held in named_tensors(model):
        converted = revert_weight_conversion(model, {name: on_meta(held)})
        shapes.update({key: tuple(value.shape) for key, value in converted.items()})
    return shapes


def unconverted_names(model: nn.Module) -> dict[str, str]:
    """The names that files use, of the held tensors that files hold just as they are; gathers nothing."""
    names = {}
    for name, held in named_tensors(model):
        tensor = on_meta(held)
        converted = revert_weight_conversion(model, {name: tensor})
        for key, value in converted.items():
            if value is tensor:
                names[name] = key
    return names


def has_trained_head(model: nn.Module) -> bool:
    """Whether an output head is trained that is not tied to the embeddings."""
    return any(name == OUTPUT_HEAD and held.requires_grad for name, held in named_tensors(model))


def strip_wrappers(name: str) -> str:
    """Name of a parameter without what data parallelism, checkpointing and torch.compile put into it."""
    name = name.removeprefix("module.")
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
    return name


def on_meta(held: Tensor) -> Tensor:
    """A tensor of the same shape without contents. ZeRO-3 empties a parameter and keeps its shape aside."""
    shape = held.ds_shape if is_sharded(held) and hasattr(held, "ds_shape") else held.shape
    return torch.empty(shape, dtype=held.dtype, device="meta")
