"""
RAM+ as one would write it first: every model in memory, in float32, and whole tensors. For comparison.

```sh
python recipes/benchmarks/plain.py --base_model base --agents code tool memory --output_dir merged
```

It knows nothing of `ram_trl`: equations 1, 2, 6 and 7 of the paper with its r, alpha and epsilon, nothing else.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


R, ALPHA, EPSILON = 0.1, 2.0, 1e-5

Model = dict[str, Tensor]


def load(path: Path) -> Model:
    return {name: tensor.float() for name, tensor in load_file(path / "model.safetensors").items()}


def masks_of(deltas: list[Tensor]) -> Tensor:
    return torch.stack([delta.abs() > EPSILON for delta in deltas])


def overlap_ratios(task_vectors: list[Model]) -> list[float]:
    """rho of every agent over the whole model: shared / unique changes."""
    shared = unique = torch.zeros(len(task_vectors), dtype=torch.int64)
    for name in task_vectors[0]:
        masks = masks_of([task_vector[name] for task_vector in task_vectors]).flatten(1)
        overlap = masks.sum(0)
        shared = shared + (masks & (overlap >= 2)).sum(1)
        unique = unique + (masks & (overlap == 1)).sum(1)
    return (shared.double() / unique).tolist()


def merge(base: Model, task_vectors: list[Model], factors: list[float]) -> Model:
    """The base plus unique changes times lambda and the mean of shared ones, in bfloat16."""
    merged = {}
    for name, values in base.items():
        deltas = [task_vector[name] for task_vector in task_vectors]
        masks = masks_of(deltas)
        overlap = masks.sum(0)
        unique, total = torch.zeros_like(values), torch.zeros_like(values)
        for delta, mask, factor in zip(deltas, masks, factors, strict=True):
            unique += factor * delta * mask
            total += delta * mask
        merged[name] = (values + torch.where(overlap >= 2, total / overlap, unique)).bfloat16()
    return merged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base_model", type=Path, required=True, help="directory of the base model")
    parser.add_argument("--agents", type=Path, nargs="+", required=True, help="directories of the agents")
    parser.add_argument("--output_dir", type=Path, required=True, help="directory for the merged model")
    args = parser.parse_args()
    base = load(args.base_model)
    agents = [load(path) for path in args.agents]
    task_vectors = [{name: agent[name] - values for name, values in base.items()} for agent in agents]
    del agents
    ratios = overlap_ratios(task_vectors)
    factors = [1 + R * min(ratio, ALPHA) for ratio in ratios]
    merged = merge(base, task_vectors, factors)
    args.output_dir.mkdir(parents=True)
    save_file(merged, args.output_dir / "model.safetensors", metadata={"format": "pt"})
    report = {"agents": [{"name": path.name, "rho": rho} for path, rho in zip(args.agents, ratios, strict=True)]}
    (args.output_dir / "merge_report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
