"""Where a loaded model holds the tensors of its files."""

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from ..errors import UnsupportedModelError
from ..registering.checks import COMPUTED_BUFFERS
from ..registering.live_model import check_backend, named_tensors, on_meta, strip_wrappers, unwrap
from ..sharded import is_sharded
from ..storage.manifest import TensorRecord
from ..storage.tensor_file import TensorInfo


__all__ = ["find_places", "held_ranges"]

_LOAD = "load the base with AutoModelForCausalLM.from_pretrained(...)"


def find_places(
    model: nn.Module, infos: dict[str, TensorInfo], records: dict[str, TensorRecord], needed: Collection[str]
) -> dict[str, Tensor]:
    """Views of a model's memory by the names that files use.

    Args:
        model (`nn.Module`):
            The model.
        infos (`dict[str, TensorInfo]`):
            Tensors of the base's files.
        records (`dict[str, TensorRecord]`):
            What was recorded of them.
        needed (`Collection[str]`):
            Tensors that must have a place, unless they are tied to one that has. Others may be missing: transformers
            leaves some out of a model.

    Returns:
        `dict[str, Tensor]`: views, of the shapes in the files; those of fused experts may not be contiguous.

    Raises:
        UnsupportedModelError: naming a parameter that cannot be written to or found in the files, and the cure.
    """
    model = unwrap(model)
    check_backend(model)
    if isinstance(model, PeftModel) or any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise UnsupportedModelError(f"the model has PEFT adapters attached: {_LOAD} without them, or unload them")
    places: dict[str, Tensor] = {}
    known: dict[tuple, list[_Part]] = {}
    parameters = {strip_wrappers(name) for name, _ in model.named_parameters()}
    for name, held in named_tensors(model):
        if is_sharded(held):
            raise UnsupportedModelError(
                f"parameter {name!r} is spread over several processes: {_LOAD} in each of them, with "
                "device_map='auto' if it is larger than one GPU"
            )
        if held.is_meta:
            raise UnsupportedModelError(
                f"parameter {name!r} is offloaded to the CPU's memory or to a disk: use more or larger GPUs, or a "
                "device map that keeps the whole model on devices"
            )
        if held.is_inference():
            raise UnsupportedModelError(
                f"parameter {name!r} was made under torch.inference_mode, outside of which it cannot change: load the "
                "model outside"
            )
        for key, place in _placed(model, name, held.detach(), known):
            info = infos.get(key)
            if info is None:
                if name in parameters:
                    raise UnsupportedModelError(
                        f"the base's files have no tensor {key!r}, which the model has: {_LOAD}"
                    )
                continue
            if info.dtype.is_floating_point and not place.is_floating_point():
                raise UnsupportedModelError(f"parameter {name!r} is quantised: {_LOAD} without quantisation")
            if place.shape != info.shape:
                raise UnsupportedModelError(
                    f"tensor {key!r} is {list(place.shape)} in the model and {list(info.shape)} in the base's files: "
                    f"{_LOAD}, neither quantised nor resized"
                )
            places[key] = place
    for name in needed:
        if name not in places and records[name].tied_to not in places and not name.endswith(COMPUTED_BUFFERS):
            raise UnsupportedModelError(f"the model has no parameter for tensor {name!r} of the base's files: {_LOAD}")
    return places


def held_ranges(place: Tensor, start: int, stop: int) -> Iterator[tuple[int, int, Tensor]]:
    """Elements `start ... stop - 1` of a flattened view: where each part of them begins and ends, and a view of it."""
    if place.is_contiguous() or place.ndim == 1:
        yield start, stop, place.view(-1)[start:stop] if place.is_contiguous() else place[start:stop]
        return
    row = math.prod(place.shape[1:])
    for number in range(start // row, -(-stop // row)):
        first = number * row
        low, high = max(start, first), min(stop, first + row)
        for begin, end, part in held_ranges(place[number], low - first, high - first):
            yield first + begin, first + end, part


def _placed(
    model: nn.Module, name: str, held: Tensor, known: dict[tuple, list["_Part"]]
) -> Iterator[tuple[str, Tensor]]:
    """A held tensor under the names that files use: itself, or views of its parts, as fused experts have them."""
    whole = on_meta(held)
    converted = revert_weight_conversion(model, {name: whole})
    if [id(part) for part in converted.values()] == [id(whole)]:
        yield next(iter(converted)), held
        return
    # layers are converted alike
    kind = (re.sub(r"\d+", "#", name), held.shape, held.is_contiguous())
    if kind not in known:
        known[kind] = _parts(model, name, held)
    for key, part in zip(converted, known[kind], strict=True):
        yield key, held.as_strided(part.shape, part.stride, held.storage_offset() + part.offset)


@dataclass(frozen=True, slots=True)
class _Part:
    """Which elements of a contiguous tensor a tensor of the files is."""

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


def _parts(model: nn.Module, name: str, held: Tensor) -> list[_Part]:
    """Convert the numbers of a tensor's elements instead of the elements, and see where they go."""
    refusal = UnsupportedModelError(
        f"parameter {name!r} is computed from the tensors of the base's files, not only put together from them: it "
        "cannot be changed in place; evaluate the model's directory on its own (--merged)"
    )
    if not held.is_contiguous():
        raise refusal
    dtype = torch.int32 if held.numel() < 2**31 else torch.int64
    numbers = torch.arange(held.numel(), dtype=dtype).view(held.shape)
    parts, seen = [], 0
    for converted in revert_weight_conversion(model, {name: numbers}).values():
        if converted.dtype != dtype or not converted.numel():
            raise refusal
        first = converted[(0,) * converted.ndim].item()
        stride = tuple(
            int(converted.select(axis, 1)[(0,) * (converted.ndim - 1)]) - first if size > 1 else 1
            for axis, size in enumerate(converted.shape)
        )
        if any(step < 0 for step in stride):
            raise refusal
        if not torch.equal(numbers.as_strided(converted.shape, stride, first), converted):
            raise refusal
        parts.append(_Part(first, converted.shape, stride))
        seen += converted.numel()
    if seen != held.numel():
        raise refusal
    return parts
