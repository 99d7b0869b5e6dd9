"""
Makes the models of the benchmark: Qwen2 shapes, random weights, agents that changed as much as those of the paper.

```sh
# models/base, models/code, models/tool, models/memory
python recipes/benchmarks/models.py --size 0.5B --output_dir models --agents 0 1 2
```

They are the same bytes every time. A model is made in pieces, so that its size does not matter, appears under its name
when it is complete, and is not made again.
"""

import argparse
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


WEIGHTS = "model.safetensors"
BASE_SEED = 0
BASE_STD = 0.02
PIECE_NUMEL = 1 << 22


@dataclass(frozen=True)
class Shape:
    """Dimensions of a Qwen2 model, named as in its `config.json`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    tie_word_embeddings: bool

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            **vars(self),
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors in the order of the file."""
        hidden, inter = self.hidden_size, self.intermediate_size
        key_value = hidden // self.num_attention_heads * self.num_key_value_heads
        layer = {
            "input_layernorm.weight": (hidden,),
            "mlp.down_proj.weight": (hidden, inter),
            "mlp.gate_proj.weight": (inter, hidden),
            "mlp.up_proj.weight": (inter, hidden),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.o_proj.weight": (hidden, hidden),
        }
        for name, rows in (("k_proj", key_value), ("q_proj", hidden), ("v_proj", key_value)):
            layer |= {f"self_attn.{name}.bias": (rows,), f"self_attn.{name}.weight": (rows, hidden)}
        embedding = (self.vocab_size, hidden)
        tensors = {} if self.tie_word_embeddings else {"lm_head.weight": embedding}
        tensors["model.embed_tokens.weight"] = embedding
        for index in range(self.num_hidden_layers):
            tensors |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        return tensors | {"model.norm.weight": (hidden,)}

    def numel(self) -> int:
        return sum(math.prod(shape) for shape in self.tensors().values())


@dataclass(frozen=True)
class AgentKind:
    """
    How an agent differs from the base.

    Args:
        density (`float`):
            Share of the elements that the paper's agent changed.
        share (`float`):
            Share of the elements, chosen at random, that are updated at all.
        std (`float`):
            Standard deviation of the updates. Together with `share` it gives the density: of small updates bfloat16
            rounds many away.
    """

    density: float
    share: float
    std: float


SIZES = {
    "tiny": Shape(64, 160, 2, 4, 2, 4096, True),
    "0.5B": Shape(896, 4864, 24, 14, 2, 151936, True),
    "1.5B": Shape(1536, 8960, 28, 12, 2, 151936, True),
    "7B": Shape(3584, 18944, 28, 28, 4, 152064, False),
}
KINDS = {
    "code": AgentKind(density=0.032, share=0.0473, std=1e-4),
    "tool": AgentKind(density=0.462, share=1.0, std=4.87e-5),
    "memory": AgentKind(density=0.543, share=1.0, std=6.33e-5),
}


def agent_kind(index: int) -> str:
    return list(KINDS)[index % len(KINDS)]


def agent_name(index: int) -> str:
    """code, tool, memory, code2, tool2, memory2, code3, and so on."""
    generation = index // len(KINDS) + 1
    return agent_kind(index) + (str(generation) if generation > 1 else "")


def file_header(shape: Shape) -> bytes:
    """What comes before the data in the safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    stop = 0
    for name, dimensions in shape.tensors().items():
        start, stop = stop, stop + 2 * math.prod(dimensions)
        header[name] = {"dtype": "BF16", "shape": dimensions, "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def base_pieces(shape: Shape) -> Iterator[bytes]:
    """The data of the base, which is one array: all tensors have the same dtype."""
    import torch

    generator = torch.Generator().manual_seed(BASE_SEED)
    for start in range(0, shape.numel(), PIECE_NUMEL):
        values = torch.randn(min(PIECE_NUMEL, shape.numel() - start), generator=generator) * BASE_STD
        yield to_bytes(values)


def agent_pieces(shape: Shape, base: Path, index: int) -> Iterator[bytes]:
    """The data of an agent: that of the base, updated in float32 and rounded."""
    import torch

    kind, generator = KINDS[agent_kind(index)], torch.Generator().manual_seed(BASE_SEED + 1 + index)
    with (base / WEIGHTS).open("rb") as file:
        file.seek(len(file_header(shape)))
        while piece := file.read(2 * PIECE_NUMEL):
            values = torch.frombuffer(bytearray(piece), dtype=torch.bfloat16).float()
            update = torch.randn(len(values), generator=generator) * kind.std
            if kind.share < 1:
                update *= torch.rand(len(values), generator=generator) < kind.share
            yield to_bytes(values + update)


def to_bytes(values: Any) -> bytes:
    """A float32 tensor, rounded, as the bytes of the file."""
    import torch

    return values.bfloat16().view(torch.int16).numpy().tobytes()


def write_model(output_dir: Path, shape: Shape, pieces: Iterator[bytes]) -> None:
    """Writes a model directory that has its name when it is complete, unless it is there."""
    if output_dir.exists():
        return
    partial = output_dir.with_name(f"{output_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n")
    with (partial / WEIGHTS).open("wb") as file:
        file.write(file_header(shape))
        file.writelines(pieces)
    partial.rename(output_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), required=True, help="shapes of the models")
    parser.add_argument("--output_dir", type=Path, required=True, help="directory of the model directories")
    parser.add_argument("--agents", type=int, nargs="*", default=[], help="numbers of the agents to make, from 0")
    args = parser.parse_args()
    shape, base = SIZES[args.size], args.output_dir / "base"
    write_model(base, shape, base_pieces(shape))
    for index in args.agents:
        write_model(args.output_dir / agent_name(index), shape, agent_pieces(shape, base, index))


if __name__ == "__main__":
    main()
