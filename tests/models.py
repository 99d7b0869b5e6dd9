"""Tiny models, agents and adapters on disk for the tests, made locally and kept for the whole session."""

import itertools
import shutil
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3MoeConfig,
)

from ram_trl.storage.registry import AgentRegistry


CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .:=+-"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}={% endfor %}"

_SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
_GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
# The wide ones have embeddings longer than one tile of 2**19 elements; 48 columns do not divide a tile. The linear
# layers of one have several panels, those of another several tiles and blocks.
CONFIGS = {
    "qwen2_tied": lambda: Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, tie_word_embeddings=True, **_SMALL
    ),
    "qwen2_wide": lambda: Qwen2Config(
        vocab_size=17000, hidden_size=32, intermediate_size=600, tie_word_embeddings=True, **_SMALL
    ),
    "qwen2_untied": lambda: Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, tie_word_embeddings=False, **_SMALL
    ),
    "llama": lambda: LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, tie_word_embeddings=False, **_SMALL
    ),
    "llama_wide": lambda: LlamaConfig(
        vocab_size=11200, hidden_size=48, intermediate_size=64, tie_word_embeddings=False, **_SMALL
    ),
    "llama_tall": lambda: LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=33_000,
        tie_word_embeddings=False,
        **{**_SMALL, "num_hidden_layers": 1},
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
        tie_word_embeddings=False,
        **_SMALL,
    ),
    "gpt2": lambda: GPT2Config(**_GPT2),
    "gpt2_untied": lambda: GPT2Config(tie_word_embeddings=False, **_GPT2),
}

_ADAPTER = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "v_proj"]}


class Zoo:
    """Makes tiny models in a folder, each of them once.

    Args:
        folder (`Path`):
            Where to put them.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._made: dict[tuple, Path] = {}
        self._numbers = itertools.count()

    def base(
        self, kind: str, dtype: torch.dtype = torch.bfloat16, shards: str = "5GB", stored_head: bool = False
    ) -> Path:
        """A base model with its tokenizer; `stored_head`: its files also hold the tied output head."""

        def make(path: Path) -> None:
            torch.manual_seed(len(kind))
            config = CONFIGS[kind]()
            config.bos_token_id, config.eos_token_id, config.pad_token_id = None, 1, 0
            model = AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    # norms and biases, which start as constants, too
                    parameter.add_(torch.randn_like(parameter) * 0.02)
            model.to(dtype).save_pretrained(path, max_shard_size=shards)
            tokenizer().save_pretrained(path)
            if stored_head:
                tensors = load_file(path / "model.safetensors")
                tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
                save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

        return self._make(("base", kind, dtype, shards, stored_head), make)

    def agent(
        self, base: Path, seed: int, density: float = 0.2, scale: float = 1e-3, dtype: torch.dtype | None = None
    ) -> Path:
        """A full fine-tune: random sparse changes of every tensor, in `dtype` (the base's if unset)."""

        def make(path: Path) -> None:
            copy_model(base, path)
            generator = torch.Generator().manual_seed(seed)
            for file in sorted(path.glob("*.safetensors")):
                rewrite(file, lambda name, tensor: _sparsely_changed(tensor, density, scale, generator, dtype))

        return self._make(("agent", base, seed, density, scale, dtype), make)

    def adapter(self, base: Path, seed: int = 0, **options) -> Path:
        """A LoRA adapter with random nonzero factors; `options` are those of `LoraConfig`."""

        def make(path: Path) -> None:
            save_adapter(base, path, LoraConfig(**{**_ADAPTER, **options}), seed)

        return self._make(("adapter", base, seed, repr(options)), make)

    def registry(self, base: Path, models: dict[str, Path]) -> AgentRegistry:
        """A registry with these agents. Do not write to it."""
        from ram_trl import register_agent

        def make(path: Path) -> None:
            for name, model in models.items():
                register_agent(AgentRegistry(path), name, str(model), base_model=str(base), epsilon=0.0)

        return AgentRegistry(self._make(("registry", base, tuple(models.items())), make))

    def _make(self, key: tuple, make) -> Path:
        if key not in self._made:
            path = self._folder / f"{next(self._numbers):03d}-{key[0]}"
            make(path)
            self._made[key] = path
        return self._made[key]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, with a chat template."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )


def copy_model(source: Path, target: Path) -> Path:
    """A copy of a model directory that a test may change."""
    return shutil.copytree(source, target)


def rewrite(file: Path, change) -> None:
    """Rewrite every tensor of a safetensors file: `change(name, tensor)` gives the new one, or `None` to drop it."""
    changed = {name: change(name, tensor) for name, tensor in load_file(file).items()}
    save_file({n: t.contiguous() for n, t in changed.items() if t is not None}, file, metadata={"format": "pt"})


def change_tensor(model: Path, name: str, change) -> None:
    """Apply `change` to one tensor of a model directory, whichever file it is in."""
    for file in model.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            if name not in opened.keys():
                continue
        rewrite(file, lambda key, tensor: change(tensor) if key == name else tensor)
        return
    raise KeyError(name)


def read_model(model: Path) -> dict[str, Tensor]:
    """All tensors of a model directory."""
    tensors = {}
    for file in sorted(model.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def save_adapter(base: Path, path: Path, config: LoraConfig, seed: int = 0) -> None:
    """Train, so to speak, an adapter: every trainable parameter moves."""
    torch.manual_seed(seed)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(path)


def merged_by_peft(base: Path, adapter: Path, folder: Path) -> dict[str, Tensor]:
    """What PEFT makes of an adapter and its base, saved in `folder`, by the names of the base's files."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(folder)
    return read_model(folder)


def _sparsely_changed(
    tensor: Tensor, density: float, scale: float, generator: torch.Generator, dtype: torch.dtype | None
) -> Tensor:
    mask = torch.rand(tensor.shape, generator=generator) < density
    update = torch.randn(tensor.shape, generator=generator) * scale
    return (tensor.float() + update * mask).to(dtype or tensor.dtype)
