"""The sections of the benchmark: what is measured of models of one size, and by which commands."""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.mergekit import METHODS, MergeKit, fastest_flags, try_flags
from benchmarks.models import KINDS, SIZES, WEIGHTS, agent_name
from benchmarks.process import (
    FLOOR,
    IMPORT_TORCH,
    OURS,
    SYNCED_FLOOR,
    Command,
    Stopwatch,
    console,
    kept,
    remove,
)


HERE = Path(__file__).resolve().parent
MERGE = str(HERE.parent / "merge.py")


class Benchmark:
    """
    The sections of the benchmark for models of one size.

    Args:
        root (`Path`):
            Directory of the benchmark.
        size (`str`):
            Size of the models.
        runs (`int`):
            How often everything is measured.
        gpu (`str`):
            Name of the GPU, empty if there is none.
    """

    def __init__(self, root: Path, size: str, runs: int, gpu: str):
        self.size, self.runs, self.gpu = size, runs, gpu
        self.results = root / "results" / size
        self.models = root / "models" / size
        self.base = self.models / "base"
        self.agents = [self.models / kind for kind in sorted(KINDS)]
        self.registry = root / "registries" / size
        self.stopwatch = Stopwatch(root, runs)
        self.scratch = self.stopwatch.scratch

    def prepare(self) -> None:
        """Makes the models and registers the agents, as far as that has not been done."""
        self.make_agents(range(len(KINDS)))
        for path in self.agents:
            self.register(self.registry, path)
        kept(self.results / "agents.json", {}, self.describe_agents)

    def make_agents(self, indices: Sequence[int]) -> None:
        names = [agent_name(index) for index in indices]
        if not all((self.models / name).exists() for name in names):
            arguments = ["--size", self.size, "--output_dir", str(self.models), "--agents", *map(str, indices)]
            self.stopwatch.step(f"make {', '.join(names)}", [str(HERE / "models.py"), *arguments])

    def register(self, registry: Path, model: Path) -> None:
        if not (registry / "agents" / model.name).exists():
            self.stopwatch.step(f"register {model.name}", self.register_arguments(registry, model))

    def register_arguments(self, registry: Path, model: Path) -> list[str]:
        options = ["--agent", model.name, "--model", str(model), "--base_model", str(self.base)]
        return ["-m", "ram_trl", "register", "--registry", str(registry), *options]

    def describe_agents(self) -> dict[str, Any]:
        listed = self.registered(self.registry)
        agents = [{name: agent[name] for name in ("name", "density", "bytes")} for agent in listed]
        return {
            "parameters": SIZES[self.size].numel(),
            "checkpoint_bytes": (self.base / WEIGHTS).stat().st_size,
            "agents": [agent | {"paper_density": KINDS[agent["name"]].density} for agent in agents],
        }

    def registered(self, registry: Path) -> list[dict[str, Any]]:
        arguments = ["-m", "ram_trl", "list", "--registry", str(registry), "--json"]
        return json.loads(self.stopwatch.step("list the agents", arguments))

    def tune_mergekit(self, program: Path) -> MergeKit:
        """MergeKit with the flags that are the fastest on this machine."""
        console.print(f"[bold]{self.size}: flags of mergekit[/]")
        tried = kept(
            self.results / "mergekit.json",
            {"program": str(program), "gpu": self.gpu},
            lambda: try_flags(program, self.stopwatch, self.base, self.agents, bool(self.gpu)),
        )["tried"]
        return MergeKit(program, fastest_flags(tried))

    def ours(self, name: str, launcher: list[str], *options: str) -> Command:
        """A merge of the registered agents by `recipes/merge.py`."""
        output_dir = self.scratch / "merged"
        arguments = [*launcher, MERGE, "--registry", str(self.registry), "--output_dir", str(output_dir), *options]
        return Command(name, [sys.executable, *arguments], output_dir, start_up=IMPORT_TORCH)

    def merge(self, mergekit: MergeKit | None) -> dict[str, Any]:
        """Merges of the same agents by all means, the least that the machine needs for it, and what start-up takes."""
        commands = [self.ours(OURS, [])]
        if self.gpu:
            commands.append(self.ours("ours, on the GPU", [], "--engine", "eager"))
        if mergekit is not None:
            commands += [mergekit.merge(method, self.base, self.agents, self.scratch) for method in METHODS]
        # ours does not return before the model is on the disk
        commands += [self.plain(), self.floor(FLOOR), self.floor(SYNCED_FLOOR, ' && sync "$0"')]
        probe = [sys.executable, MERGE, "--registry", str(self.registry), "--probe_only"]
        commands.append(Command("ours, probe only", probe, start_up=IMPORT_TORCH))
        commands.append(Command("start-up: python", [sys.executable, "-c", "pass"]))
        commands.append(self.import_torch())
        commands.append(Command("start-up: merge.py --help", [sys.executable, MERGE, "--help"]))
        if mergekit is not None:
            commands.append(mergekit.start_up())
        measured = self.stopwatch.take_turns(commands)
        arguments = ["merge", "--registry", str(self.registry)]
        return {"commands": measured, "phases": self.inside("phases of a merge", arguments)}

    def plain(self) -> Command:
        output_dir = self.scratch / "plain"
        arguments = [str(HERE / "plain.py"), "--base_model", str(self.base), "--agents"]
        arguments += [*map(str, self.agents), "--output_dir", str(output_dir)]
        return Command("plain float32", [sys.executable, *arguments], output_dir, start_up=IMPORT_TORCH)

    def floor(self, name: str, then: str = "") -> Command:
        """Copies the base and reads what a merge reads."""
        base, output = self.base / WEIGHTS, self.scratch / "copy.safetensors"
        inputs = [base, *sorted(path for path in self.registry.rglob("*") if path.is_file())]
        script = 'cp --reflink=never "$1" "$0" && shift && cat "$@" > /dev/null' + then
        return Command(name, ["sh", "-c", script, str(output), str(base), *map(str, inputs)], output)

    def import_torch(self) -> Command:
        return Command(IMPORT_TORCH, [sys.executable, "-c", "import torch"])

    def inside(self, name: str, arguments: list[str]) -> dict[str, list[dict[str, float]]]:
        arguments = [*arguments, "--output_dir", str(self.scratch / "inside"), "--runs", str(self.runs)]
        # DeepSpeed, where it is installed, prints when it is imported
        return json.loads(self.stopwatch.step(name, [str(HERE / "inside.py"), *arguments]).splitlines()[-1])

    def processes(self) -> dict[str, Any]:
        """The same merge by one process and by several, with and without a launcher, and by each engine."""
        accelerate = ["-m", "accelerate.commands.launch", "--num_processes"]
        torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2"]
        commands = [
            self.ours("1 process", []),
            self.ours("1 process, accelerate launch", [*accelerate, "1"]),
            # Without a GPU accelerate starts one process whatever the number, unless it is told so.
            self.ours("2 processes, accelerate launch", [*accelerate, "2", "--multi_gpu"]),
            self.ours("2 processes, torchrun", torchrun),
            self.ours("1 process, --engine compiled", [], "--engine", "compiled"),
            self.ours("1 process, --engine eager", [], "--engine", "eager"),
        ]
        measured = self.stopwatch.take_turns(commands)
        digests = {result["sha256"] for result in measured.values() if result["failure"] is None}
        return {"commands": measured, "identical_bytes": len(digests) == 1}

    def snapshot(self) -> dict[str, Any]:
        """Registering and restoring each agent, as commands and in a process that also saves the model as usual."""
        commands = []
        for path in self.agents:
            registry, restored = self.scratch / "registry", self.scratch / "restored"
            register = self.register_arguments(registry, path)
            restore = ["-m", "ram_trl", "restore", "--registry", str(self.registry), "--agent", path.name]
            restore += ["--output_dir", str(restored)]
            commands.append(Command(f"ram-trl register {path.name}", [sys.executable, *register], registry))
            commands.append(Command(f"ram-trl restore {path.name}", [sys.executable, *restore], restored))
        measured = self.stopwatch.take_turns(commands)
        arguments = ["snapshot", "--base_model", str(self.base), "--models", *map(str, self.agents)]
        return {"commands": measured, "inside": self.inside("snapshots in a process", arguments)}

    def scaling(self, counts: list[int]) -> dict[str, Any]:
        """Merges of more and more agents; of a further agent only what is in the registry stays on disk."""
        registry = self.registry.with_name(f"{self.size}-scaling")
        if not registry.exists():
            partial = shutil.copytree(self.registry, self.scratch / registry.name)
            partial.rename(registry)
        names = [agent_name(index) for index in range(max(counts))]
        for index, name in enumerate(names):
            if not (registry / "agents" / name).exists():
                self.make_agents([index])
                self.register(registry, self.models / name)
            if index >= len(KINDS):
                remove(self.models / name)
        commands = []
        for count in counts:
            output_dir = self.scratch / "merged"
            arguments = [MERGE, "--registry", str(registry), "--output_dir", str(output_dir)]
            arguments += ["--agents", *names[:count]]
            commands.append(Command(f"{count} agents", [sys.executable, *arguments], output_dir))
        commands.append(self.import_torch())
        stored = {agent["name"]: agent["bytes"] for agent in self.registered(registry)}
        stored_bytes = {f"{count} agents": sum(stored[name] for name in names[:count]) for count in counts}
        return {"commands": self.stopwatch.take_turns(commands), "stored_bytes": stored_bytes}
