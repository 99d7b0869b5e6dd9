"""Faults of one of two ranks; each writes `FOLDER/outcomes-RANK.json`. `test_faults.py` starts it.

run_faults.py faults FOLDER BASE MOE
run_faults.py killed FOLDER BASE RANK
"""

import contextlib
import errno
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import BF16, OPTIONS, ROLLOUTS, AtStep, grpo, train
from transformers import AutoModelForCausalLM, TrainerControl, TrainerState
from trl import GRPOConfig

from ram_trl import AgentRegistry, RAMRegistryCallback
from ram_trl.distributed import World
from ram_trl.registering import live, live_model
from ram_trl.registering.snapshot import FullSnapshot


RANK = int(os.environ["RANK"])


def outcome(action: Callable[[], Any], callback: RAMRegistryCallback) -> dict[str, Any]:
    """What an action gave or raised, how long it took, and what the callback says of it."""
    started = time.monotonic()
    try:
        result = {"result": action()}
    except Exception as error:
        result = {"raised": type(error).__name__}
    return {
        **result,
        "seconds": time.monotonic() - started,
        "error": type(callback.error).__name__,
        "message": str(callback.error),
        "registered": None if callback.registered is None else str(callback.registered),
    }


@contextlib.contextmanager
def broken(owner: Any, name: str, error: Exception, rank: int | None, call: int = 1) -> Iterator[None]:
    """On one rank a function raises an error when it is called for the `call`th time."""
    function, calls = getattr(owner, name), []

    def maybe_fail(*arguments, **options):
        calls.append(arguments)
        if RANK == rank and len(calls) == call:
            raise error
        return function(*arguments, **options)

    with mock.patch.object(owner, name, maybe_fail):
        yield


def trained(folder: Path, base: str, agent: str, **arguments) -> dict[str, Any]:
    """A data parallel run, and whether its model could be saved afterwards."""
    callback = RAMRegistryCallback(folder / "registry", agent=agent, **arguments)
    trainer = grpo(base, folder / "out", [callback], **BF16)
    result = outcome(lambda: train(trainer).state.global_step, callback)
    trainer.save_model(str(folder / f"saved-{agent}"))
    return result


def sharded_model(base: str) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def faults(folder: Path, base: str, moe: str) -> dict[str, Any]:
    unforeseen, full = ZeroDivisionError("unforeseen"), OSError(errno.ENOSPC, "No space left on device")
    outcomes = {}
    # on one rank the base is not there, as on a machine of its own
    for rank in (0, 1):
        os.chdir("/" if RANK == rank else Path(base).parent)
        outcomes[f"begin on {rank}"] = trained(folder, base, "begin", base_model=Path(base).name)
    for rank in (0, 1):
        for name, strict in (("names", False), ("strict", True)):
            with broken(live, "unconverted_names", unforeseen, rank):
                outcomes[f"{name} on {rank}"] = trained(folder, base, name, strict=strict)
    for name, fault in {
        "gathering on 0": broken(FullSnapshot, "add", unforeseen, 0, call=3),
        "commit on 0": broken(AgentRegistry, "commit", full, 0),
        "clean": contextlib.nullcontext(),
    }.items():
        with fault:
            outcomes[name] = trained(folder, base, name.split()[0])

    # Trainers shard on a GPU only: the callback gets a sharded model as it would from one.
    model = sharded_model(moe)
    # the names of all tensors are asked for once, then the experts of one layer after the other are converted
    second_layer = sum(1 for _ in live_model.named_tensors(model)) + 3
    args = GRPOConfig(output_dir=str(folder / "out"), **{**OPTIONS, **ROLLOUTS})
    event = (args, TrainerState(max_steps=2), TrainerControl(), model)
    for where, rank in {"sharded on 0": 0, "sharded on 1": 1, "sharded": None}.items():
        callback = RAMRegistryCallback(folder / "registry", agent="sharded")
        callback.on_train_begin(*event)
        with broken(live_model, "revert_weight_conversion", unforeseen, rank, call=second_layer):
            outcomes[where] = outcome(lambda run=callback: run.on_train_end(*event), callback)
    return outcomes


def killed(folder: Path, base: str, rank: str) -> dict[str, Any]:
    """One rank is killed in the middle of the snapshot."""
    gather, calls = World.gather, []

    def gather_or_die(world: World, value: Any) -> list[Any]:
        calls.append(value)
        if len(calls) == 10 and RANK == int(rank):
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(world, value)

    callback = RAMRegistryCallback(folder / "registry", agent="math")
    after_last_step = AtStep(2, lambda model: setattr(World, "gather", gather_or_die))
    trainer = grpo(base, folder / "out", [callback, after_last_step], save_strategy="steps", save_steps=2, **BF16)
    result = outcome(lambda: train(trainer).state.global_step, callback)
    trainer.save_model(str(folder / "saved"))
    return result


def main() -> None:
    logging.basicConfig()
    scenario, folder, *arguments = sys.argv[1:]
    outcomes = {"faults": faults, "killed": killed}[scenario](Path(folder), *arguments)
    Path(folder, f"outcomes-{RANK}.json").write_text(json.dumps(outcomes))
    if scenario == "faults":
        dist.barrier()
    # All is written. Once in some forty runs gloo's threads abort a process while it ends.
    os._exit(0)


if __name__ == "__main__":
    main()
