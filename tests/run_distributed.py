"""What several processes do together; each writes `FOLDER/NAME-RANK.json`. `test_distributed.py` starts it.

torchrun --nproc_per_node 2 run_distributed.py SCENARIO FOLDER BASE...
"""

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from ram_trl import AgentRegistry, merge_agents
from ram_trl.distributed import World, current_world
from ram_trl.errors import AgentNotFoundError, StorageError
from ram_trl.merging import merge as merging
from ram_trl.registering import live_adapter, live_model
from ram_trl.registering.live import LiveRegistration
from ram_trl.sharded import stream_parameter


def outcome(action: Callable[[], Any]) -> dict[str, Any]:
    """What an action gave or raised, and how long it took."""
    started = time.monotonic()
    try:
        result = {"result": action()}
    except Exception as error:
        result = {"error": type(error).__name__, "message": str(error)}
    return {**result, "seconds": time.monotonic() - started}


def collectives(folder: Path) -> dict[str, Any]:
    dist.init_process_group("gloo")
    world = World(dist.get_rank(), dist.get_world_size())

    def fail_on(rank: int | None, error: Exception) -> Callable[[], str]:
        def action():
            if rank in (None, world.rank):
                raise error
            return "done"

        return action

    not_found = AgentNotFoundError("no such agent")
    return {
        "gather": outcome(lambda: world.gather({"rank": world.rank})),
        "sum_counts": outcome(lambda: world.sum_counts([2**60 + world.rank, world.rank, 0])),
        "run": outcome(lambda: world.run(lambda: world.rank)),
        "run_on_main": outcome(lambda: world.run_on_main(lambda: world.rank + 7)),
        "agree": outcome(lambda: world.agree(None)),
        "fail_on_0": outcome(lambda: world.run(fail_on(0, StorageError("disk full")))),
        "fail_on_1": outcome(lambda: world.run(fail_on(1, StorageError("disk full")))),
        "fail_on_both": outcome(lambda: world.run(fail_on(None, StorageError(f"disk {world.rank} full")))),
        "foreign_error_on_1": outcome(lambda: world.run(fail_on(1, ZeroDivisionError("of one")))),
        "main_fails": outcome(lambda: world.run_on_main(fail_on(0, not_found))),
        "agree_on_error_of_1": outcome(lambda: world.agree(not_found if world.rank == 1 else None)),
        # after all of these nobody is a collective ahead of the others
        "still_in_step": outcome(lambda: world.gather(world.rank)),
    }


def streams(folder: Path) -> dict[str, Any]:
    """Four ranks: parameters that some of them hold parts of, or all, twice, or none."""
    dist.init_process_group("gloo")
    world = World(dist.get_rank(), dist.get_world_size())
    row, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    rows = (Shard(0),)

    def pieces_of(whole: torch.Tensor, mesh: DeviceMesh, placements: tuple) -> list[list[float]] | str:
        parameter = nn.Parameter(distribute_tensor(whole, mesh, placements))
        pieces = stream_parameter(parameter, 4, world)
        return "whole" if pieces is None else [piece.tolist() for piece in pieces]

    def numbers(*shape: int) -> torch.Tensor:
        return torch.arange(float(torch.Size(shape).numel())).view(shape)

    def one_fails() -> None:
        tensor = distribute_tensor(numbers(8, 2), row, rows)
        if world.rank == 2:
            tensor.detach = lambda: 1 / 0
        stream_parameter(tensor, 4, world)

    cases = {
        "even": (numbers(8, 2), row, rows),
        "uneven": (numbers(7, 3), row, rows),
        "one rank holds nothing": (numbers(5), row, rows),
        "one rank holds all": (numbers(1, 9), row, rows),
        "empty": (numbers(0, 3), row, rows),
        "held twice": (numbers(5, 3), square, (Replicate(), Shard(0))),
        "held twice, side by side": (numbers(5, 3), square, (Shard(0), Replicate())),
        "columns": (numbers(4, 4), row, (Shard(1),)),
        "rows of columns": (numbers(4, 4), square, (Shard(0), Shard(1))),
        "rows of rows": (numbers(8, 4), square, (Shard(0), Shard(0))),
        "copies": (numbers(4, 4), row, (Replicate(),)),
    }
    outcomes = {name: outcome(lambda case=case: pieces_of(*case)) for name, case in cases.items()}
    outcomes["plain"] = outcome(lambda: stream_parameter(numbers(4), 4, world))
    outcomes["one fails"] = outcome(one_fails)
    outcomes["still in step"] = outcome(lambda: pieces_of(*cases["even"]))
    return outcomes


def moving(folder: Path) -> dict[str, Any]:
    """Ranks that find different versions of an agent: one registry each, and once alone at the first look."""
    dist.init_process_group("gloo")
    world = World(dist.get_rank(), dist.get_world_size())
    looks, plan_merge = [], merging.plan_merge

    def late(registry: AgentRegistry, agents: list[str], *arguments: Any) -> Any:
        looks.append(agents)
        is_late = world.rank == 1 and len(looks) == 1
        return plan_merge(registry, ["math@v1"] if is_late else agents, *arguments)

    def merge_late() -> list[int]:
        with mock.patch.object(merging, "plan_merge", late):
            report = merge_agents(str(folder / "registry-0"), str(folder / "late"), agents=["math"], world=world)
        return [row["version"] for row in report["agents"]]

    own, output = str(folder / f"registry-{world.rank}"), str(folder / "apart")
    return {
        "apart": outcome(lambda: merge_agents(own, output, agents=["math"], world=world)),
        "late": outcome(merge_late),
        "looks": len(looks),
    }


def own_group(folder: Path) -> dict[str, Any]:
    """A run whose own group has no patience, and that ends its groups and begins again."""
    outcomes = {}

    def group_of() -> bool:
        first, second = current_world(), current_world()
        return first.group is second.group and first.group is not dist.group.WORLD

    def late() -> list[int]:
        world = current_world()
        if world.is_main:
            time.sleep(6)
        return world.gather(world.rank)

    for run in ("first", "second"):
        # a store of its own: torchrun's still has the addresses of the groups before
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / run}",
            rank=int(os.environ["RANK"]),
            world_size=2,
            timeout=timedelta(seconds=3),
        )
        outcomes[f"{run} group"] = outcome(group_of)
        outcomes[f"{run} late"] = outcome(late)
        dist.barrier()
        dist.destroy_process_group()
    outcomes["none"] = outcome(lambda: current_world().size)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'end'}", rank=int(os.environ["RANK"]), world_size=2)
    return outcomes


def trained_model(base: str) -> nn.Module:
    """A model whose weights moved, alike on all ranks."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    return model


def registration(folder: Path, agent: str, base: str) -> LiveRegistration:
    return LiveRegistration(
        registry=AgentRegistry(folder / "registry"),
        agent=agent,
        base_model=base,
        revision=None,
        snapshot_dtype="auto",
        epsilon=1e-5,
    )


def register(folder: Path, agent: str, base: str, model: nn.Module, world: World) -> str | None:
    live = registration(folder, agent, base)
    live.check(model, world)
    agent = live.register(model, world, None, {})
    return None if agent is None else str(agent)


def main_fails(folder: Path, base: str) -> dict[str, Any]:
    """Each rank holds the whole model, as in data parallelism; looking at its third tensor fails on rank 0."""
    # a rank that waits for the other is freed, and its test fails, long before the test's own limit
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    world, outcomes = World(dist.get_rank(), dist.get_world_size()), {}
    full = trained_model(base)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    lora = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), config)

    def faulty(function: Callable) -> Callable:
        calls = []

        def third_fails(*arguments):
            calls.append(arguments)
            if world.is_main and len(calls) == 3:
                raise ZeroDivisionError("unforeseen")
            return function(*arguments)

        return third_fails

    for agent, model, module, name in (
        ("conversion", full, live_model, "revert_weight_conversion"),
        ("parameter", full, live_model, "full_parameter"),
        ("adapter", lora, live_adapter, "full_parameter"),
    ):
        live = registration(folder, agent, base)
        live.check(model, world)
        with mock.patch.object(module, name, faulty(getattr(module, name))):
            outcomes[agent] = outcome(lambda live=live, model=model: live.register(model, world, None, {}))
    # after all of these nobody is a collective ahead of the others
    outcomes["then"] = outcome(lambda: register(folder, "then", base, full, world))
    return outcomes


def fsdp1(folder: Path, base: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    world, outcomes = World(dist.get_rank(), dist.get_world_size()), {}

    def wrapped(**options) -> nn.Module:
        model = trained_model(base)
        layers = {type(model.model.layers[0])}
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=layers)
        if options.pop("layers", False):
            options["auto_wrap_policy"] = policy
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)

    for case, options in {
        "NO_WRAP": {"use_orig_params": True},
        "NO_WRAP, flat": {"use_orig_params": False},
        "TRANSFORMER_BASED_WRAP": {"use_orig_params": True, "layers": True},
    }.items():
        model, live = wrapped(**options), registration(folder, "math", base)
        outcomes[case] = outcome(lambda model=model, live=live: live.check(model, world))
    return outcomes


def fsdp2(folder: Path, *bases: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    mesh, world, outcomes = init_device_mesh("cpu", (2,)), World(dist.get_rank(), dist.get_world_size()), {}

    def sharded(model: nn.Module) -> nn.Module:
        for layer in model.get_submodule(
            "base_model.model.model" if hasattr(model, "peft_config") else "model"
        ).layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    for base in bases:
        model = trained_model(base)
        if world.is_main:
            model.save_pretrained(folder / "saved" / Path(base).name)
        model = sharded(model)
        outcomes[Path(base).name] = outcome(lambda m=model, b=base: register(folder, Path(b).name, b, m, world))
    # the same model again, with a NaN in the part that rank 1 holds
    with torch.no_grad():
        local = model.model.layers[0].mlp.down_proj.weight.to_local()
        if world.rank == 1:
            local[0, 0] = float("nan")
    outcomes["nan"] = outcome(lambda: register(folder, "nan", bases[-1], model, world))

    torch.manual_seed(1)
    lora = get_peft_model(
        AutoModelForCausalLM.from_pretrained(bases[-1], dtype=torch.bfloat16),
        LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
        autocast_adapter_dtype=False,
    )
    if world.is_main:
        lora.save_pretrained(folder / "saved" / "adapter")
    outcomes["lora"] = outcome(lambda: register(folder, "lora", bases[-1], sharded(lora), world))
    return outcomes


def grpo_ddp(folder: Path, base: str) -> dict[str, Any]:
    from training import AtStep, grpo, train

    from ram_trl import RAMRegistryCallback

    registry = folder / "registry"

    def run(agent: str, damage: Callable[[], Any] | None = None, **arguments) -> dict[str, Any]:
        callback = RAMRegistryCallback(registry, agent=agent, **arguments)

        def on_main(model: nn.Module) -> None:
            if damage is not None and os.environ["RANK"] == "0":
                damage()

        options = {"model_init_kwargs": {"dtype": "bfloat16"}}
        trainer = grpo(base, folder / "out", [callback, AtStep(2, on_main)], **options)
        result = outcome(lambda: train(trainer).state.global_step)
        result["world_size"] = trainer.accelerator.num_processes
        result["registered"] = None if callback.registered is None else str(callback.registered)
        result["generalist"] = None if callback.generalist is None else str(callback.generalist)
        result["callback_error"] = type(callback.error).__name__
        trainer.save_model(str(folder / f"saved-{agent}"))
        return result

    def replace() -> None:
        registry.rename(folder / "away")
        registry.write_text("")

    def bring_back() -> None:
        dist.barrier()
        if os.environ["RANK"] == "0":
            registry.unlink()
            (folder / "away").rename(registry)
        dist.barrier()

    def promotes(candidate: Path, report: dict[str, Any]) -> bool:
        return "RANK" in os.environ and os.environ["RANK"] == "0"

    outcomes = {
        "clean": run("clean"),
        "merged": run("merged", merge_to="generalist", merge_config={"gate": promotes}),
        "fault": run("fault", replace),
    }
    outcomes["refused"] = run("refused")
    bring_back()
    outcomes["strict"] = run("strict", replace, strict=True)
    bring_back()
    return outcomes


def methods(folder: Path, registry: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    world, outcomes = World(dist.get_rank(), dist.get_world_size()), {}
    for case, options in json.loads((folder / "cases.json").read_text()).items():
        target = str(folder / "two" / case)
        outcomes[case] = outcome(lambda t=target, o=options: merge_agents(registry, t, world=world, **o)["agents"])
    return outcomes


def zero3(folder: Path, base: str) -> dict[str, Any]:
    import deepspeed

    # else it compiles collectives of its own, for a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    world = World(dist.get_rank(), dist.get_world_size())
    model = trained_model(base)
    if world.is_main:
        model.save_pretrained(folder / "saved")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    return {"registered": outcome(lambda: register(folder, "math", base, engine.module, world))}


def main() -> None:
    scenario, folder, bases = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    outcomes = globals()[scenario](folder, *bases)
    (folder / f"{scenario}-{os.environ['RANK']}.json").write_text(json.dumps(outcomes))
    dist.barrier()
    # All is written. Once in some forty runs gloo's threads abort a process while it ends.
    os._exit(0)


if __name__ == "__main__":
    main()
