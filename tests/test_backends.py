"""Every backend, kind and dtype: GRPO runs that the configurations in accelerate_configs/ start, in two processes on a
CPU. The registered agent is what a save of the whole model holds, element by element. `make matrix` prints the table.
"""

import itertools
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from models import CONFIGS, Zoo, read_model
from run_backends import BACKENDS, DTYPES, KINDS
from torch import Tensor
from training import assert_same_weights, restored_weights, run_shell
from transformers import Qwen2Config

from ram_trl import AgentRegistry
from ram_trl.storage.tensor_file import PIECE_NUMEL


SCRIPT = Path(__file__).parent / "run_backends.py"
CONFIGURATIONS = Path(__file__).parent.parent / "accelerate_configs"
# Configuration -> what is changed of it for a CPU: command line, environment, and the backends that it starts.
ON_CPU = {"ACCELERATE_USE_CPU": "true"}
LAUNCHES = {
    "single_gpu": ("--cpu", {}, ["single process"]),
    # with --cpu one process would start; the variable says the same to each of several
    "multi_gpu": ("--num_processes 2", ON_CPU, ["DDP", "FSDP2 at load", "tensor parallel at load", "FSDP1"]),
    "fsdp2": ("--num_processes 2", ON_CPU, ["FSDP2"]),
    # ACCELERATE_USE_CPU would switch DeepSpeed off
    "deepspeed_zero2": ("--num_processes 2", {"DS_ACCELERATOR": "cpu"}, ["DeepSpeed ZeRO-2"]),
    "deepspeed_zero3": ("--num_processes 2", {"DS_ACCELERATOR": "cpu"}, ["DeepSpeed ZeRO-3"]),
}
MEASURED = {"DDP": "multi_gpu", "FSDP2": "fsdp2", "DeepSpeed ZeRO-3": "deepspeed_zero3"}
CELLS = list(itertools.product(BACKENDS, KINDS, DTYPES))
PEFT_GATHERS = "PEFT gathers all of an adapter at once"
REFUSED = {
    **{("FSDP1", *cell): "FSDP1 flattens parameters: use FSDP2" for cell in itertools.product(KINDS, DTYPES)},
    # torch's own words: PEFT's factors are in float32, and FSDP1 flattens them together with the base
    **{("FSDP1", "LoRA", f"{dtype} weights"): "flatten tensors with uniform dtype" for dtype in ("bf16", "fp16")},
    **{("FSDP2 at load", "LoRA", dtype): PEFT_GATHERS for dtype in DTYPES},
    **{("tensor parallel at load", "LoRA", dtype): PEFT_GATHERS for dtype in DTYPES},
}


class Launches:
    """Starts each configuration once, when the first of its outcomes is asked for."""

    def __init__(self, folder: Path, zoo: Zoo):
        self._folder, self._zoo = folder, zoo
        self._outcomes: dict[str, dict[tuple, tuple[list[dict[str, Any]], Path]]] = {}

    def base(self, dtype: str) -> Path:
        return self._zoo.base("qwen2_tied", DTYPES[dtype].base)

    def outcome(self, configuration: str, *cell: str) -> tuple[list[dict[str, Any]], Path]:
        """What each rank saw of a cell, and the folder that it left."""
        if configuration not in self._outcomes:
            self._outcomes[configuration] = self._launch(configuration)
        return self._outcomes[configuration][cell]

    def _launch(self, configuration: str) -> dict[tuple, tuple[list[dict[str, Any]], Path]]:
        arguments, environment, backends = LAUNCHES[configuration]
        cells = [("cell", *cell) for cell in itertools.product(backends, KINDS, DTYPES)]
        cells += [("memory", name) for name, measured in MEASURED.items() if measured == configuration]
        bases = {"memory": self._zoo.base("qwen2_dominated"), **{dtype: self.base(dtype) for dtype in DTYPES}}
        folder = self._folder / configuration
        folder.mkdir()
        (folder / "cells.json").write_text(
            json.dumps([(*cell, str(bases[cell[-1] if cell[0] == "cell" else "memory"])) for cell in cells])
        )
        command = ["accelerate", "launch", "--config_file", str(CONFIGURATIONS / f"{configuration}.yaml")]
        command += [
            "--main_process_port",
            "0",
            *arguments.split(),
            str(SCRIPT),
            str(folder),
            str(folder / "cells.json"),
        ]
        done = run_shell(shlex.join(command), env={"OMP_NUM_THREADS": "1", **environment}, timeout=400)
        assert done.returncode == 0, done.stderr[-4000:]
        ranks = [json.loads(file.read_text()) for file in sorted(folder.glob("outcomes-*.json"))]
        assert len(ranks) == (1 if configuration == "single_gpu" else 2)
        return {
            cell[1:]: ([rank[number] for rank in ranks], folder / str(number)) for number, cell in enumerate(cells)
        }


@pytest.fixture(scope="module")
def launches(tmp_path_factory, zoo: Zoo) -> Launches:
    # the embeddings are 96 % of it
    CONFIGS["qwen2_dominated"] = lambda: Qwen2Config(
        vocab_size=65536,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return Launches(tmp_path_factory.mktemp("backends"), zoo)


def configuration_of(backend: str) -> str:
    return next(name for name, (_, _, backends) in LAUNCHES.items() if backend in backends)


def check_cell(launches: Launches, backend: str, kind: str, dtype: str, path: Path) -> str:
    """`pass` if the agent equals the saved model, or the text of the refusal.

    Raises:
        AssertionError: if it was registered and is something else, or the ranks disagree.
    """
    ranks, folder = launches.outcome(configuration_of(backend), backend, kind, dtype)
    errors = [rank.get("raised") or rank["error"] for rank in ranks]
    if any(errors):
        assert all(errors), errors
        return errors[0]
    assert [rank["registered"] for rank in ranks] == ["agent@v1", None][: len(ranks)]
    if kind == "LoRA":
        saved = read_model(folder / "saved")
        assert all(tensor.abs().max() > 0 for tensor in saved.values())
        assert_same_weights(read_model(AgentRegistry(folder / "registry").get("agent").path), saved)
    else:
        trained = check_full(folder, DTYPES[dtype].registered, path)
        base = read_model(launches.base(dtype))
        assert all(not torch.equal(trained[name], base[name].to(trained[name].dtype)) for name in base)
    return "pass"


def check_full(folder: Path, dtype: torch.dtype, path: Path) -> dict[str, Tensor]:
    """The registered weights, which are the saved ones in a dtype."""
    saved = read_model(folder / "saved")
    if "lm_head.weight" in saved:
        # gathered tensors do not know any more that they are tied, and are saved twice
        assert torch.equal(saved.pop("lm_head.weight"), saved["model.embed_tokens.weight"])
    registered = restored_weights(folder / "registry", "agent", path)
    assert_same_weights(registered, {name: tensor.to(dtype) for name, tensor in saved.items()})
    return registered


@pytest.mark.parametrize(("backend", "kind", "dtype"), CELLS)
def test_the_agent_of_a_run_is_the_saved_model_element_by_element(launches, tmp_path, backend, kind, dtype):
    verdict = check_cell(launches, backend, kind, dtype, tmp_path / "back")
    refusal = REFUSED.get((backend, kind, dtype))
    assert verdict == "pass" if refusal is None else refusal in verdict


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_runs_are_on_the_backend_that_they_are_named_after(launches, backend):
    if backend == "FSDP1":
        pytest.skip("refused before it starts")
    ranks, _ = launches.outcome(configuration_of(backend), backend, "full", "float32")
    for rank in ranks:
        parameters = "DTensor" if "FSDP2" in backend or "tensor parallel" in backend else "Tensor"
        assert parameters in rank["parameters"]
        assert rank["num_processes"] == len(ranks)
        assert rank["is_partitioned"] == (backend == "DeepSpeed ZeRO-3")
        expected = {"single process": "NO", "FSDP2": "FSDP", "tensor parallel at load": "MULTI_GPU"}
        assert rank["distributed_type"] == (
            "DEEPSPEED" if "DeepSpeed" in backend else expected.get(backend, "MULTI_CPU")
        )


def matrix(launches: Launches, folder: Path) -> str:
    """The verdicts as a Markdown table."""
    columns = list(itertools.product(KINDS, DTYPES))
    lines = [
        "| backend | " + " | ".join(f"{kind}, {dtype}" for kind, dtype in columns) + " |",
        "|---" * (1 + len(columns)) + "|",
    ]
    for backend in BACKENDS:
        row = [check_cell(launches, backend, *column, folder / f"{backend}-{column}") for column in columns]
        lines.append(f"| {backend} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def test_the_matrix(launches, tmp_path):
    print("\n\n" + matrix(launches, tmp_path) + "\n")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("backend", MEASURED)
def test_registering_takes_the_memory_of_a_few_pieces(launches, tmp_path, backend):
    ranks, folder = launches.outcome(MEASURED[backend], backend)
    piece = PIECE_NUMEL * 2
    # Two threads have two pieces each at hand; beside them there are what they make of a piece, and the allocator's.
    few = 24 * piece
    for rank, grown in enumerate(ranks):
        print(f"{backend}, rank {rank}: {grown['with'] / 2**20:.0f} MiB, {grown['without'] / 2**20:.0f} without")
        assert grown["error"] is None
        assert grown["with"] - grown["without"] < few < 65536 * 512 * 2
    # a rank that only sends holds a piece
    assert ranks[1]["with"] - ranks[1]["without"] < 8 * piece
    check_full(folder, torch.bfloat16, tmp_path / "back")


@pytest.mark.parametrize("file", sorted(CONFIGURATIONS.glob("*.yaml")), ids=lambda file: file.stem)
def test_accelerate_understands_every_configuration(file):
    config = load_config_from_file(str(file))
    assert config.num_processes == (1 if file.stem in ("cpu", "single_gpu") else 8)
