"""The snapshot of a LoRA agent: the adapter as PEFT writes it, and a map from base tensors to factors.

The map is resolved here, once, with PEFT's own rules for ranks, scaling and names, so that a merge needs neither PEFT
nor its configuration.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..arithmetic.codec import is_mergeable
from ..errors import IncompatibleAgentError, UnsupportedModelError
from ..storage.checkpoint import INPUT_EMBEDDINGS, OUTPUT_HEAD, Checkpoint
from ..storage.manifest import LoraRecord


__all__ = [
    "INITIAL_FACTORS",
    "MERGE_FIRST",
    "PREFIX",
    "TRAIN_LORA",
    "AdapterLayer",
    "adapter_features",
    "changes_base",
    "check_mergeable",
    "check_targets",
    "config_scaling",
    "map_adapter",
]

# PEFT's name of the wrapped model.
PREFIX = "base_model.model."
# Initialisations that leave the base's weights as they are.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
# Not scaling * B @ A, but PEFT can merge it.
_MERGED_OPTIONS = {
    "use_dora": "DoRA",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "BD-LoRA",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "lora_bias": "lora_bias",
    "ensure_weight_tying": "ensure_weight_tying",
    "target_parameters": "target_parameters",
    "trainable_token_indices": "trainable_token_indices",
}
_REFUSED_OPTIONS = {
    "alora_invocation_tokens": "aLoRA, which acts on some tokens only,",
    "arrow_config": "Arrow, which chooses an adapter for every token,",
    "layer_replication": "layer_replication, which gives the model layers that the base does not have,",
    "megatron_config": "LoRA on Megatron's layers",
}
# Each was merged and compared with the forward pass of the adapted model (tests/test_adapters.py).
_MERGED_TYPES = (
    *("ADALORA", "BEFT", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "FROD", "GLORA", "GRALORA", "HIRA", "HRA"),
    *("IA3", "LN_TUNING", "LOHA", "LOKR", "LORA", "MISS", "OFT", "OSF", "PEANUT", "PSOFT", "PVERA", "RANDLORA"),
    *("ROAD", "SHIRA", "SUPERTUNING", "TINYLORA", "TRAINABLE_TOKENS", "UNILORA", "VBLORA", "VERA", "WAVEFT"),
)
_FACTOR = re.compile(r"(?P<module>.+)\.(?:lora_(?P<linear>[AB])\.weight|lora_embedding_(?P<embedding>[AB]))")
# Their layers are Conv1D, which stores weights as (in, out).
_CONV1D_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
MERGE_FIRST = "merge the adapter into its model (merge_and_unload), save that and register it as a full fine-tune"
# The file in a run's output_dir that keeps what [`~ram_trl.registering.initial_factors`] needs.
INITIAL_FACTORS = "ram_trl_initial_factors.safetensors"
TRAIN_LORA = "train a plain LoRA or the whole model"


@dataclass(frozen=True, slots=True)
class AdapterLayer:
    """What a LoRA layer of a live model holds.

    Args:
        scaling (`float`):
            Factor of B @ A.
        transposed (`bool`):
            Whether the base stores the layer's weight as (in, out).
    """

    scaling: float
    transposed: bool


def adapter_features(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What makes an adapter something else than W + scaling * B @ A over the original base; nothing for a plain LoRA.

    Args:
        config (`Mapping`):
            Content of `adapter_config.json`.
        shapes (`Mapping[str, tuple[int, ...]]`):
            Shapes of the adapter file's tensors, by PEFT's names.
    """
    peft_type = _peft_type(config)
    if peft_type != "LORA":
        return [peft_type]
    options = {**_MERGED_OPTIONS, **_REFUSED_OPTIONS}
    features = [feature.split(",")[0] for option, feature in options.items() if config.get(option)]
    if config.get("init_lora_weights", True) not in _PLAIN_INITS:
        features.append(f"init_lora_weights={config['init_lora_weights']!r}")
    if any(len(shape) > 2 and "lora_" in name for name, shape in shapes.items()):
        features.append("LoRA on convolutions")
    return features


def changes_base(config: Mapping[str, Any]) -> bool:
    """Whether an adapter took something out of the base's weights in memory when it was made."""
    is_plain = config.get("init_lora_weights", True) in _PLAIN_INITS and not config.get("kasa_config")
    return _peft_type(config) == "LORA" and not is_plain


def check_mergeable(config: Mapping[str, Any]) -> None:
    """Refuse adapters that cannot be merged into their model.

    Raises:
        UnsupportedModelError: naming the feature.
    """
    peft_type = _peft_type(config)
    if peft_type not in _MERGED_TYPES:
        raise UnsupportedModelError(
            f"adapters of type {peft_type} cannot be merged into their model, so they are no change of its weights: "
            f"{TRAIN_LORA}"
        )
    for option, feature in _REFUSED_OPTIONS.items():
        if config.get(option):
            raise UnsupportedModelError(f"{feature} cannot be merged into the model: {TRAIN_LORA}")


def _peft_type(config: Mapping[str, Any]) -> str:
    return str(config.get("peft_type")).rpartition(".")[2]


def _check_alphas(config: Mapping[str, Any]) -> None:
    alphas = {"lora_alpha": config.get("lora_alpha", 8), **_alpha_pattern(config)}
    for name, alpha in alphas.items():
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not abs(alpha) < 1e6:
            raise UnsupportedModelError(f"the adapter's configuration has {name}={alpha!r}, which is no usable number")


def config_scaling(config: Mapping[str, Any], module: str, rank: int) -> float:
    """PEFT's scaling of a module: alpha / rank, or alpha / sqrt(rank) with rsLoRA; patterns by the module's name."""
    alpha = config.get("lora_alpha", 8)
    for pattern, value in _alpha_pattern(config).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = value
            break
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _alpha_pattern(config: Mapping[str, Any]) -> dict[str, Any]:
    patterns = config.get("alpha_pattern") or {}
    try:
        for pattern in patterns.keys():
            re.compile(pattern)
    except (AttributeError, TypeError, re.error) as error:
        raise UnsupportedModelError(f"the adapter's configuration has an unusable alpha_pattern: {error}") from error
    return patterns


def check_targets(names: Iterable[str], base: Checkpoint) -> None:
    """Refuse an adapter on modules that the base's files do not hold under the same names.

    Args:
        names (`Iterable[str]`):
            Names of the base tensors that the adapter changes.

    Raises:
        IncompatibleAgentError: if the base has no such tensor.
        UnsupportedModelError: if the tensor repeats another one (a tied output head), or another one repeats it.
    """
    for name in names:
        if name in base.tied or (name == OUTPUT_HEAD and name not in base.tensors):
            raise UnsupportedModelError(f"the adapter changes {name!r}, which the base ties to another: {MERGE_FIRST}")
        head_is_tied = base.ties_embeddings and (bool(base.tied) or OUTPUT_HEAD not in base.tensors)
        if head_is_tied and name.endswith(INPUT_EMBEDDINGS):
            # PEFT trains the embedding alone; in the merged model the output head would change with it.
            raise UnsupportedModelError(
                f"the adapter changes {name!r}, which the base ties to its output head, and the head was trained "
                "without it: untie the base, save it, and train from that"
            )
        if name not in base.tensors:
            raise IncompatibleAgentError(f"the adapter changes {name!r}, which the base {base.name} does not have")


def map_adapter(
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
    base: Checkpoint,
    layers: Mapping[str, AdapterLayer] | None = None,
) -> dict[str, LoraRecord]:
    """Find for every tensor of a plain LoRA's file which base tensor it changes, and how.

    Args:
        shapes (`Mapping[str, tuple[int, ...]]`):
            Shapes of the adapter file's tensors, by PEFT's names.
        config (`Mapping`):
            Content of `adapter_config.json`.
        base ([`~ram_trl.storage.checkpoint.Checkpoint`]):
            Base model.
        layers (`Mapping[str, AdapterLayer]`, *optional*):
            What the layers of a live model hold, by the base's module names. Without it the configuration and the
            shapes decide.

    Raises:
        UnsupportedModelError: if it changes what the base ties, or the base is quantised.
        IncompatibleAgentError: if it does not fit the base.
    """
    _check_alphas(config)
    records: dict[str, LoraRecord] = {}
    replaced: dict[str, str] = {}
    for key in shapes:
        if not key.startswith(PREFIX):
            raise IncompatibleAgentError(f"adapter tensor {key!r} does not begin with {PREFIX!r}")
        match = _FACTOR.fullmatch(key.removeprefix(PREFIX))
        if match is None:
            replaced[key.removeprefix(PREFIX).replace(".base_layer.", ".")] = key
            continue
        record = records.setdefault(f"{match['module']}.weight", LoraRecord(transposed=bool(match["embedding"])))
        if (match["linear"] or match["embedding"]) == "A":
            record.factor_a = key
        else:
            record.factor_b = key
    for name, key in replaced.items():
        # Beside factors on an embedding PEFT saves the frozen embedding too.
        if name not in records:
            records[name] = LoraRecord(replaced_by=key)
    check_targets(records, base)
    for name, record in records.items():
        if not is_mergeable(base.tensors[name].dtype):
            raise UnsupportedModelError(
                f"base tensor {name!r} is quantised ({base.tensors[name].dtype}): register against the original base"
            )
        if record.replaced_by is None:
            _complete(name, record, shapes, config, base, layers or {})
        elif shapes[record.replaced_by] != base.tensors[name].shape:
            raise IncompatibleAgentError(
                f"adapter tensor {record.replaced_by!r} has shape {list(shapes[record.replaced_by])}, "
                f"in the base it has {list(base.tensors[name].shape)}"
            )
    return records


def _complete(
    name: str,
    record: LoraRecord,
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
    base: Checkpoint,
    layers: Mapping[str, AdapterLayer],
) -> None:
    """Find scaling and orientation of a pair of factors."""
    if record.factor_a is None or record.factor_b is None:
        raise IncompatibleAgentError(f"the adapter has only one of the two factors of {name!r}")
    shape_a, shape_b, expected = shapes[record.factor_a], shapes[record.factor_b], base.tensors[name].shape
    if 0 in shape_a:
        raise IncompatibleAgentError(f"the factors of {name!r} are empty")
    module, plain, flipped = name.removesuffix(".weight"), (shape_b[0], shape_a[1]), (shape_a[1], shape_b[0])
    if module in layers:
        record.scaling, record.transposed = layers[module].scaling, layers[module].transposed
    else:
        record.scaling = config_scaling(config, module, rank=shape_a[0])
        # Where the shape does not tell, the kind of model does.
        is_conv1d = base.config.get("model_type") in _CONV1D_MODELS and name != OUTPUT_HEAD
        record.transposed |= flipped == expected and (plain != expected or is_conv1d)
    if shape_a[0] != shape_b[1] or expected != (flipped if record.transposed else plain):
        raise IncompatibleAgentError(
            f"the factors of {name!r} have shapes {list(shape_b)} and {list(shape_a)}, the base has {list(expected)}"
        )
