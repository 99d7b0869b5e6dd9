"""The memory of a snapshot, a merge and a restoration does not grow with the model."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file


_MEASURE = """
import resource, sys
import torch
from ram_trl import AgentRegistry, merge_agents, register_agent, restore_agent

folder = sys.argv[1]
registry = AgentRegistry(folder + "/registry")
torch.set_num_threads(2)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for agent in ("a", "b"):
    register_agent(registry, agent, folder + "/" + agent, base_model=folder + "/base")
merge_agents(registry, folder + "/merged")
restore_agent(registry, "a", folder + "/restored")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def write_model(folder, num_layers, update=0.0):
    base, noise = torch.randn(2, 4096, 2048, generator=torch.Generator().manual_seed(0))
    folder.mkdir(parents=True)
    tensors = {}
    for layer in range(num_layers):
        weight = base.roll(layer) * 0.02 + noise.roll(layer + int(update * 1e6)) * update
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"] = weight.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": False}))
    return sum(tensor.numel() * 2 for tensor in tensors.values()) / 2**20


@pytest.fixture(scope="module")
def growth(tmp_path_factory):
    """Size of a small and a large model, and by how much memory grew while they were worked on, in MiB."""
    measured = []
    for num_layers in (1, 5):
        folder = tmp_path_factory.mktemp(f"layers{num_layers}")
        size = write_model(folder / "base", num_layers)
        write_model(folder / "a", num_layers, update=2e-5)
        write_model(folder / "b", num_layers, update=3e-5)
        output = subprocess.run(
            [sys.executable, "-c", _MEASURE, str(folder)], capture_output=True, text=True, check=True
        ).stdout
        measured.append((size, float(output)))
    return measured


def test_memory_is_bounded_by_tiles_not_by_the_model(growth):
    (small_size, small), (large_size, large) = growth
    assert large_size - small_size == 64
    assert large - small < 12, f"{large - small:.0f} MiB more for a model that is 64 MiB larger"
    assert large < 96
