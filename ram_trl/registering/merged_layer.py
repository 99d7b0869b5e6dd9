"""One layer of PEFT's, merged: in a copy on the CPU, in float32, over the values of the base's files.

The model in training is not touched, and what repeated merging in 16 bits left in its weights is not taken for
training. Only where the adapter was made by changing the base, the weights in memory are those that go with it.
"""

import copy
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from ..errors import UnsupportedModelError
from ..storage.checkpoint import Checkpoint
from .adapter import TRAIN_LORA, changes_base
from .live_model import on_meta


__all__ = ["as_files", "is_memory_the_base", "merged_module"]


@torch.no_grad()
def merged_module(model: PeftModel, path: str, module: nn.Module, base: Checkpoint) -> dict[str, Tensor]:
    """What an adapter makes of one module, by the names of the base's files.

    Raises:
        UnsupportedModelError: if PEFT cannot merge it.
    """
    if isinstance(module, ModulesToSaveWrapper):
        if not module.active_adapters:
            return {}
        module = module.modules_to_save[module.active_adapter]
    elif isinstance(module, TrainableTokensWrapper):
        module = module.token_adapter
    if isinstance(module, BaseTunerLayer):
        module = _copy_over_base(model, path, module, base)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                merged = _merge(module)
        except Exception as error:
            raise UnsupportedModelError(
                f"the adapter of {path!r} cannot be merged into the model ({error}): {TRAIN_LORA}"
            ) from error
        module = merged
    return as_files(model, {f"{path}.{name}": held.detach() for name, held in module.named_parameters()})


def _merge(layer: BaseTunerLayer) -> nn.Module:
    """The base's layer, with all active adapters in it."""
    # layers with parts of their own to merge have their own way, as PEFT itself looks for it
    if hasattr(layer, "unload_and_optionally_merge_module"):
        return layer.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    layer.merge(safe_merge=False)
    return layer.get_base_layer()


def _copy_over_base(model: PeftModel, path: str, layer: BaseTunerLayer, base: Checkpoint) -> BaseTunerLayer:
    """A copy of an adapter's layer on the CPU, in float32, in which the base's weights are those of its files."""
    is_from_memory = is_memory_the_base(model)
    memo: dict[int, Any] = {}
    for name, held in layer.named_parameters():
        if "base_layer." in name and not held.requires_grad and not is_from_memory:
            values = _from_files(model, f"{path}.{name.replace('base_layer.', '')}", held, base)
            if values is not None:
                memo[id(held)] = nn.Parameter(values, requires_grad=False)
    for child in layer.modules():
        for name, value in vars(child).items():
            if "hook" in name:
                # what they belong to is not to be copied
                memo[id(value)] = OrderedDict() if isinstance(value, dict) else value
            else:
                memo.update({id(held): _on_cpu(held) for held in _tensors_in(value) if id(held) not in memo})
    copied = copy.deepcopy(layer, memo).eval()
    for child in copied.modules():
        if isinstance(child, BaseTunerLayer) and not is_from_memory:
            # even if the model in training is merged just now, its files are not
            child.merged_adapters = []
    return copied


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in an attribute of a module, its parameters and buffers among them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def _on_cpu(held: Tensor) -> Tensor:
    dtype = torch.float32 if held.is_floating_point() else held.dtype
    copied = held.detach().to("cpu", dtype, copy=True)
    return nn.Parameter(copied, requires_grad=False) if isinstance(held, nn.Parameter) else copied


def _from_files(model: PeftModel, name: str, held: Tensor, base: Checkpoint) -> Tensor | None:
    """The base's own values of a parameter, float32; `None` if its files have none."""
    if not base.tensors.keys() >= as_files(model, {name: on_meta(held)}).keys():
        return None
    if name in base.tensors:
        return base.read(name).float().view(held.shape)
    # where each tensor of the files is in a parameter that is made of several
    positions = torch.arange(held.numel()).view(held.shape)
    values = torch.empty(held.numel())
    for key, part in as_files(model, {name: positions}).items():
        values[part.reshape(-1)] = base.read(key).float()
    return values.view(held.shape)


def as_files(model: PeftModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the model in memory under the names of files."""
    return revert_weight_conversion(model.get_base_model(), tensors)


def is_memory_the_base(model: PeftModel) -> bool:
    """Whether only the base's weights in memory go with the adapter, because it was made by changing them."""
    return any(changes_base(model.peft_config[name].to_dict()) for name in model.active_adapters)
