"""The adapter of a model in training: what PEFT's layers hold of it now, and its snapshot."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.lora import Embedding, Linear, LoraLayer
from torch import Tensor, nn

from ..distributed import World
from ..errors import IncompatibleAgentError
from ..progress import Progress
from ..sharded import full_parameter, is_sharded
from ..storage.checkpoint import INPUT_EMBEDDINGS, OUTPUT_HEAD, Checkpoint
from ..storage.manifest import Manifest
from .adapter import PREFIX, AdapterLayer, adapter_features, map_adapter
from .checks import check_finite, check_tensors
from .initial_factors import without_initial_factors
from .live_model import on_meta, strip_wrappers
from .records import save_adapter, write_lora_records


__all__ = [
    "adapter_shapes",
    "check_adapter",
    "check_memory",
    "check_vocabulary",
    "gather_adapter",
    "live_features",
    "snapshot_adapter",
]


def live_features(model: PeftModel, is_start_known: bool = False) -> list[str]:
    """What makes the active adapters something else than one plain LoRA, and nothing trained beside it.

    Args:
        model (`PeftModel`):
            The model in training. (TRL's frozen reference policy "ref" is not active.)
        is_start_known (`bool`, *optional*, defaults to `False`):
            Whether the factors that were taken out of the base, if any, are known: then it is a plain LoRA of twice
            the rank.
    """
    features: dict[str, None] = {}
    saved: set[int] = set()
    for name in model.active_adapters:
        config = model.peft_config[name].to_dict()
        if is_start_known and not adapter_features({**config, "init_lora_weights": True}, {}):
            config["init_lora_weights"] = True
        if other := adapter_features(config, {}):
            features.update(dict.fromkeys(other))
        else:
            features.update(dict.fromkeys(adapter_features(config, adapter_shapes(model, name))))
            saved |= {id(held) for held in _adapter_state(model, name, lambda held: held).values()}
    if len(model.active_adapters) != 1:
        features[f"{len(model.active_adapters)} active adapters"] = None
    if not features:
        trained = ((name, held) for name, held in model.named_parameters() if held.requires_grad)
        beside = [strip_wrappers(name).removeprefix(PREFIX) for name, held in trained if id(held) not in saved]
        if beside:
            features[f"{beside[0]} trained beside the adapter"] = None
    return list(features)


def check_adapter(model: PeftModel, base: Checkpoint) -> None:
    """Find before training what [`snapshot_adapter`] would refuse; gathers nothing.

    Raises:
        UnsupportedModelError: if it changes what the base ties.
        IncompatibleAgentError: if it does not fit the base.
    """
    [adapter] = model.active_adapters
    config = model.peft_config[adapter].to_dict()
    map_adapter(adapter_shapes(model, adapter), config, base, _adapter_layers(model, adapter))


def check_memory(model: PeftModel, base: Checkpoint) -> None:
    """Refuse an adapter whose base in memory is not the base on disk: what it was merged with before would be lost.

    The first and the last adapted weights are compared, where they are whole and not quantised.

    Raises:
        IncompatibleAgentError: naming the first that differs.
    """
    held = {
        strip_wrappers(name).removeprefix(PREFIX).replace(".base_layer.", "."): parameter
        for name, parameter in model.named_parameters()
        if name.endswith(".base_layer.weight") and type(parameter) is nn.Parameter and not is_sharded(parameter)
    }
    names = [name for name in held if name in base.tensors and held[name].shape == base.tensors[name].shape]
    for name in (*names[:1], *names[-1:]):
        original = base.read(name).to(held[name].dtype)
        if not torch.equal(held[name].detach().cpu().reshape(-1), original):
            raise IncompatibleAgentError(
                f"the adapter was added to a model whose {name!r} is not that of the base {base.name}: save that "
                "model (save_pretrained), load it again, and train from that"
            )


def check_vocabulary(model: PeftModel, base: Checkpoint) -> None:
    """Refuse an adapter beside embeddings that were resized: what is registered holds no new rows.

    Raises:
        IncompatibleAgentError: naming the embeddings, with the cure.
    """
    for name, held in model.named_parameters():
        name = strip_wrappers(name).removeprefix(PREFIX).replace(".base_layer.", ".")
        if name in base.tensors and name.endswith((*INPUT_EMBEDDINGS, OUTPUT_HEAD)):
            check_tensors({name: tuple(on_meta(held).shape)}, base)


def snapshot_adapter(
    model: PeftModel,
    base: Checkpoint | None,
    staged: Path | None,
    world: World,
    initial: dict[str, Tensor] | None,
    progress: Progress | None,
) -> Manifest | None:
    """Write a plain LoRA, as it is now, into a staged directory. All ranks call it.

    Args:
        model (`PeftModel`):
            The model in training, sharded or not.
        base ([`~ram_trl.storage.checkpoint.Checkpoint`], *optional*):
            Base model; needed on rank 0.
        staged (`Path`, *optional*):
            Directory to write in; needed on rank 0.
        world ([`~ram_trl.distributed.World`]):
            The processes of the run.
        initial (`dict[str, Tensor]`, *optional*):
            The factors that were taken out of the base, on rank 0, if any were.
        progress (`Callable`, *optional*):
            Called on rank 0 with what is being done, the bytes done and the bytes to do.

    Returns:
        [`~ram_trl.storage.manifest.Manifest`]: on rank 0, `None` elsewhere.

    Raises:
        RamTrlError: on all ranks.
    """
    [adapter] = model.active_adapters
    trained = world.run(lambda: gather_adapter(model, keep=world.is_main))

    def write() -> Manifest:
        config, state = model.peft_config[adapter], trained
        for name, tensor in state.items():
            check_finite(name, tensor)
        if initial is not None:
            config, state = without_initial_factors(config, state, initial)
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        lora = map_adapter(shapes, config.to_dict(), base, _adapter_layers(model, adapter))
        save_adapter(staged, config, state, base.name)
        return write_lora_records(staged, base, lora, next(iter(state.values())).dtype, progress)

    return world.run(lambda: write() if world.is_main else None)


def adapter_shapes(model: PeftModel, adapter: str) -> dict[str, tuple[int, ...]]:
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


def gather_adapter(model: PeftModel, keep: bool) -> dict[str, Tensor]:
    """The tensors of the active adapter that PEFT would save, whole. All ranks call it alike.

    Args:
        model (`PeftModel`):
            The model.
        keep (`bool`):
            Whether this rank wants them, on the CPU; else it only helps to gather.
    """

    def whole(held: Tensor) -> Tensor:
        with full_parameter(held) as tensor:
            return tensor.cpu().clone().contiguous() if keep else on_meta(held)

    [adapter] = model.active_adapters
    return _adapter_state(model, adapter, whole)


def _adapter_state(model: PeftModel, adapter: str, take: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """PEFT's state dict of an adapter, `take` applied to each held parameter."""
    # PEFT looks modules up by the names that they have in memory, wrapped ones too
    state: dict[str, Any] = {
        name: take(parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or "lora_" in name or "modules_to_save" in name
    }
    saved = get_peft_model_state_dict(model, state, adapter_name=adapter, save_embedding_layers=False)
    return {strip_wrappers(name): value for name, value in saved.items()}
