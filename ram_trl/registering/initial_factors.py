"""LoRA factors that were taken out of the base's weights when they were made (PiSSA, OLoRA, CorDA, LoRA-GA).

What such a run trains is scaling * (B @ A - B0 @ A0) against the original base: a plain LoRA of twice the rank, of
factors [A; A0] and [B, -B0]. A0 and B0 are known when training begins, and kept in a file for a run that is resumed.
"""

import copy
import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import Linear
from torch import Tensor

from ..arithmetic.lora import LoraFactors, lora_delta
from ..distributed import World
from ..sharded import full_parameter
from ..storage.checkpoint import Checkpoint
from ..storage.durable import explain_os_errors, make_dirs, sync_dir, sync_file
from ..storage.stream_writer import write_tensors
from ..storage.tensor_file import read_tensors
from .adapter import INITIAL_FACTORS, PREFIX, changes_base
from .live_model import strip_wrappers


__all__ = [
    "find_initial_factors",
    "save_initial_factors",
    "takes_out_of_base",
    "without_initial_factors",
]

# Of what float32 rounds, beside the largest weight.
_TOLERANCE = 1e-5


def takes_out_of_base(model: PeftModel) -> bool:
    """Whether a model has one adapter, a LoRA that was taken out of its base."""
    configs = [model.peft_config[name].to_dict() for name in model.active_adapters]
    return len(configs) == 1 and changes_base(configs[0])


def find_initial_factors(
    model: PeftModel,
    base: Checkpoint,
    world: World,
    shapes: Mapping[str, tuple[int, ...]],
    candidates: list[dict[str, Tensor]],
    folder: Path | None,
) -> dict[str, Tensor] | None:
    """The factors that were taken out of the base's weights: with them put back, these are the original base.

    Args:
        model (`PeftModel`):
            The model in training.
        base ([`~ram_trl.storage.checkpoint.Checkpoint`]):
            Base model.
        world ([`~ram_trl.distributed.World`]):
            The processes of the run. All ranks call this.
        shapes (`Mapping[str, tuple[int, ...]]`):
            Shapes of the adapter's tensors, by PEFT's names.
        candidates (`list[dict[str, Tensor]]`):
            Factors by PEFT's names, on rank 0. The first that fits is taken.
        folder (`Path`, *optional*):
            Where [`save_initial_factors`] may have put them.

    Returns:
        `dict[str, Tensor]`: on rank 0, empty elsewhere; `None` on all ranks if none fits.
    """
    [adapter] = model.active_adapters
    layers = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, Linear))
    name, layer = next(((name, layer) for name, layer in layers if adapter in layer.scaling), ("", None))
    if layer is None:
        return None
    module = strip_wrappers(name).removeprefix(PREFIX)

    def find(weight: Tensor) -> dict[str, Tensor] | None:
        is_kept = folder is not None and (folder / INITIAL_FACTORS).exists()
        kept = [read_tensors(folder / INITIAL_FACTORS)] if is_kept else []
        info = base.tensors.get(f"{module}.weight")
        if info is None or info.numel != weight.numel() or not weight.is_floating_point():
            return None
        original = base.read(f"{module}.weight").float()
        held = weight.cpu().reshape(-1).float()
        largest = max(float(original.abs().max()), float(held.abs().max()))
        tolerance = max(torch.finfo(weight.dtype).eps, _TOLERANCE) * largest
        names = {name for name in shapes if "lora_" in name}
        for factors in [*candidates, *kept]:
            if not names <= factors.keys() or any(factors[name].shape != shapes[name] for name in names):
                continue
            factor_a, factor_b = (factors[f"{PREFIX}{module}.lora_{factor}.weight"] for factor in "AB")
            pair = LoraFactors.from_peft(factor_a, factor_b, float(layer.scaling[adapter]), layer.fan_in_fan_out)
            restored = held + lora_delta(pair, 0, original.numel())
            if float((restored - original).abs().max()) <= tolerance:
                return factors
        return None

    with full_parameter(layer.get_base_layer().weight) as weight:
        found = world.run(lambda: find(weight) if world.is_main else None)
    is_found = world.gather(found is not None)[0]
    return (found or {}) if is_found else None


def save_initial_factors(factors: Mapping[str, Tensor], folder: Path) -> None:
    """Keep the factors for a run that is resumed: the file is there whole, or not at all."""
    path = folder / INITIAL_FACTORS
    with explain_os_errors(f"writing {path}"):
        make_dirs(folder)
        staged = path.with_suffix(".tmp")
        write_tensors(staged, factors)
        sync_file(staged)
        os.replace(staged, path)
        sync_dir(folder)


def without_initial_factors(
    config: LoraConfig, state: Mapping[str, Tensor], initial: Mapping[str, Tensor]
) -> tuple[LoraConfig, dict[str, Tensor]]:
    """The plain LoRA over the original base, of twice the rank and the same scaling, as PEFT loads it."""
    config = copy.deepcopy(config)
    config.init_lora_weights = True
    config.loftq_config, config.corda_config, config.lora_ga_config = {}, None, None
    # alpha / r, or alpha / sqrt(r) with rsLoRA, stays as it is
    growth = math.sqrt(2) if config.use_rslora else 2
    config.r, config.lora_alpha = 2 * config.r, growth * config.lora_alpha
    config.rank_pattern = {pattern: 2 * rank for pattern, rank in config.rank_pattern.items()}
    config.alpha_pattern = {pattern: growth * alpha for pattern, alpha in config.alpha_pattern.items()}
    joined = {}
    for name, tensor in state.items():
        if "lora_" in name:
            start = initial[name].to(tensor.dtype)
            is_a = name.endswith(("lora_A.weight", "lora_embedding_A"))
            joined[name] = torch.cat([tensor, start], dim=0) if is_a else torch.cat([tensor, -start], dim=1)
        else:
            joined[name] = tensor
    return config, joined
