"""An adapter on disk: a plain LoRA is copied, another is merged into its model as PEFT merges it."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..distributed import SINGLE
from ..errors import IncompatibleAgentError, UnsupportedModelError
from ..progress import Progress
from ..storage.checkpoint import ADAPTER_CONFIG, Checkpoint
from ..storage.durable import explain_os_errors, read_json
from ..storage.manifest import Manifest
from ..storage.registry import ADAPTER
from ..storage.tensor_file import read_tensors
from .adapter import INITIAL_FACTORS, MERGE_FIRST, adapter_features, changes_base, check_mergeable, map_adapter
from .checks import check_finite
from .records import save_adapter, write_lora_records


__all__ = ["adapter_writer"]


def adapter_writer(
    trained: Checkpoint,
    base: Checkpoint,
    dtype: torch.dtype | None,
    epsilon: float,
    progress: Progress | None,
) -> Callable[[Path], Manifest]:
    """Decide how an adapter is registered, and refuse it if it cannot be.

    Args:
        trained ([`~ram_trl.storage.checkpoint.Checkpoint`]):
            The adapter.
        base ([`~ram_trl.storage.checkpoint.Checkpoint`]):
            Base model.
        dtype (`torch.dtype`, *optional*):
            Dtype that merged tensors are rounded to where the base has it; by default the base's own.
        epsilon (`float`):
            Where values are stored in float32, changes of at most this size are not stored.
        progress (`Callable`, *optional*):
            Called with what is being done, how much is done and how much there is.

    Returns:
        `Callable[[Path], Manifest]`: writes the adapter into a staged directory.

    Raises:
        UnsupportedModelError: naming the feature.
        IncompatibleAgentError: if it does not fit the base.
    """
    config = read_json(trained.path / ADAPTER_CONFIG)
    shapes = {name: info.shape for name, info in trained.tensors.items()}
    if changes_base(config):
        return _changed_writer(trained, base, config, progress)
    features = adapter_features(config, shapes)
    if features:
        check_mergeable(config)
        return _merged_writer(trained, base, features, dtype, epsilon, progress)
    lora = map_adapter(shapes, config, base)

    def write(staged: Path) -> Manifest:
        for name in trained.tensors:
            check_finite(name, trained.read(name))
        with explain_os_errors(f"copying the adapter to {staged}"):
            for name in (ADAPTER, ADAPTER_CONFIG):
                shutil.copyfile(trained.path / name, staged / name)
        return write_lora_records(staged, base, lora, next(iter(trained.tensors.values())).dtype, progress)

    return write


def _changed_writer(
    trained: Checkpoint, base: Checkpoint, config: Mapping[str, Any], progress: Progress | None
) -> Callable[[Path], Manifest]:
    """Of a LoRA that was taken out of the base's weights: its change since then."""
    # imported here: a plain LoRA is registered without PEFT
    from peft import LoraConfig

    from .initial_factors import without_initial_factors

    features = adapter_features(config, {name: info.shape for name, info in trained.tensors.items()})
    # a checkpoint lies in the output_dir of its run
    places = [folder / INITIAL_FACTORS for folder in (trained.path, trained.path.parent)]
    initial = next((path for path in places if path.exists()), None)
    if initial is None or len(features) > 1:
        raise UnsupportedModelError(
            f"{', '.join(features)} changed the base's weights before training, so the factors are not the delta: put "
            f"{INITIAL_FACTORS} from the output_dir of its run beside the adapter; else {MERGE_FIRST}"
        )
    state = {name: trained.read(name).view(info.shape) for name, info in trained.tensors.items()}
    started = read_tensors(initial)
    for name, tensor in state.items():
        if "lora_" in name and (name not in started or started[name].shape != tensor.shape):
            raise IncompatibleAgentError(
                f"{initial} is not of this adapter: {name!r} is not in it, or of another shape"
            )
    try:
        peft_config = LoraConfig.from_pretrained(trained.path)
    except Exception as error:
        raise UnsupportedModelError(f"{trained.path / ADAPTER_CONFIG} is no configuration to PEFT: {error}") from error
    plain, state = without_initial_factors(peft_config, state, started)
    lora = map_adapter({name: tuple(tensor.shape) for name, tensor in state.items()}, plain.to_dict(), base)

    def write(staged: Path) -> Manifest:
        for name, tensor in state.items():
            check_finite(name, tensor)
        save_adapter(staged, plain, state, base.name)
        return write_lora_records(staged, base, lora, next(iter(state.values())).dtype, progress)

    return write


def _merged_writer(
    trained: Checkpoint,
    base: Checkpoint,
    features: list[str],
    dtype: torch.dtype | None,
    epsilon: float,
    progress: Progress | None,
) -> Callable[[Path], Manifest]:
    """Of an adapter that is no plain LoRA: what it makes of the base, loaded as a model."""
    # imported here: a plain LoRA is registered without the libraries that load models
    import transformers
    from peft import PeftModel

    from .live_merged import check_merged, snapshot_merged

    try:
        [architecture] = base.config.get("architectures") or ["AutoModelForCausalLM"]
        model = getattr(transformers, architecture).from_pretrained(base.path, dtype=torch.float32)
        # trainable, so that what was trained in full beside it is known
        model = PeftModel.from_pretrained(model, trained.path, is_trainable=True)
    except Exception as error:
        # of a configuration that they cannot use these libraries say so in errors of every kind
        raise UnsupportedModelError(
            f"{', '.join(features)}: the adapter is registered by merging it, and it could not be loaded over "
            f"{base.name} ({error}): {MERGE_FIRST}"
        ) from error
    check_merged(model, base, features)
    return lambda staged: snapshot_merged(model, base, staged, SINGLE, dtype, epsilon, features, progress)
