"""Real GRPO runs on one backend after another, of every kind and dtype. `test_backends.py` starts it as users start a
training script, with the configurations of accelerate_configs/. Each rank writes `FOLDER/outcomes-RANK.json`.

accelerate launch --config_file CONFIG run_backends.py FOLDER CELLS
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from training import LORA, grpo, train
from transformers import TrainerCallback
from transformers.distributed import DistributedConfig
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from trl import GRPOTrainer

from ram_trl import RAMRegistryCallback


KINDS = ("full", "LoRA")


@dataclass(frozen=True, slots=True)
class Dtype:
    """What a run loads, how it computes, and what is registered of a full fine-tune."""

    base: torch.dtype
    held: str
    mixed_precision: str
    registered: torch.dtype


DTYPES = {
    "bf16 weights": Dtype(torch.bfloat16, "bfloat16", "no", torch.bfloat16),
    "fp16 weights": Dtype(torch.float16, "float16", "no", torch.float16),
    "float32": Dtype(torch.bfloat16, "float32", "no", torch.float32),
    "float32, bf16 autocast": Dtype(torch.bfloat16, "float32", "bf16", torch.bfloat16),
}


class ShardedOnCPU(GRPOTrainer):
    """accelerate shards (FSDP) only where processes have GPUs. All of its code after that question runs on a CPU."""

    def create_accelerator_and_postprocess(self):
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        super().create_accelerator_and_postprocess()


class DeepSpeedOnCPU(GRPOTrainer):
    """transformers refuses bf16=True without a GPU unless use_cpu is set, with which accelerate forgets DeepSpeed."""

    def create_accelerator_and_postprocess(self):
        self.args.bf16 = self.args.mixed_precision == "bf16"
        self.args.fp16 = self.args.mixed_precision == "fp16"
        super().create_accelerator_and_postprocess()


class FSDP1OnCPU(GRPOTrainer):
    """accelerate names FSDP1 a device by its number, which a CPU has not. Here it is wrapped as accelerate would."""

    def _wrap_model(self, model, training=True, dataloader=None):
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Qwen2DecoderLayer}),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )


@dataclass(frozen=True, slots=True)
class Backend:
    """What a run on a CPU needs besides the launcher's configuration."""

    trainer: type[GRPOTrainer] = GRPOTrainer
    options: dict[str, Any] = field(default_factory=dict)
    loading: dict[str, Any] = field(default_factory=dict)

    @property
    def is_deepspeed(self) -> bool:
        return self.trainer is DeepSpeedOnCPU


_DEEPSPEED = Backend(DeepSpeedOnCPU, {"use_cpu": False, "ddp_backend": "gloo"})
BACKENDS = {
    "single process": Backend(),
    "DDP": Backend(),
    "FSDP2": Backend(ShardedOnCPU),
    "FSDP2 at load": Backend(loading={"distributed_config": DistributedConfig(fsdp_size=2)}),
    "tensor parallel at load": Backend(ShardedOnCPU, loading={"distributed_config": DistributedConfig(tp_size=2)}),
    "DeepSpeed ZeRO-2": _DEEPSPEED,
    "DeepSpeed ZeRO-3": _DEEPSPEED,
    "FSDP1": Backend(FSDP1OnCPU),
}


def trainer(
    name: str, base: str, dtype: Dtype, folder: Path, callbacks: list[TrainerCallback], lora: bool = False, **options
) -> GRPOTrainer:
    backend, mixed_precision = BACKENDS[name], dtype.mixed_precision
    if backend.is_deepspeed and mixed_precision == "no":
        # DeepSpeed takes 16-bit weights under its own mixed precision only
        mixed_precision = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}[dtype.held]
    if backend.is_deepspeed:
        import deepspeed

        # else it compiles collectives of its own, for a minute
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # what accelerate launch sets, and what the run before has left
    os.environ["ACCELERATE_MIXED_PRECISION"] = mixed_precision
    if mixed_precision != "no" and not backend.is_deepspeed:
        options[mixed_precision] = True
    return grpo(
        base,
        folder / "out",
        callbacks,
        peft_config=LoraConfig(**LORA) if lora else None,
        trainer_class=backend.trainer,
        model_init_kwargs={"dtype": dtype.held, **backend.loading},
        # in float16 a smaller one is 0
        adam_epsilon=1e-4,
        # enough to move weights near 1 in bfloat16
        **{"learning_rate": 1e-2, **backend.options, **options},
    )


def cell(folder: Path, backend: str, kind: str, dtype: str, base: str) -> dict[str, Any]:
    callback = RAMRegistryCallback(str(folder / "registry"), agent="agent", epsilon=0.0)
    run = trainer(backend, base, DTYPES[dtype], folder, [callback], lora=kind == "LoRA")
    train(run)
    run.save_model(str(folder / "saved"))
    return {
        "registered": None if callback.registered is None else str(callback.registered),
        "error": None if callback.error is None else str(callback.error),
        "distributed_type": run.accelerator.state.distributed_type.value,
        "num_processes": run.accelerator.num_processes,
        "parameters": sorted({type(parameter.data).__name__ for parameter in run.model.parameters()}),
        "is_partitioned": any(hasattr(parameter, "ds_id") for parameter in run.model.parameters()),
    }


class Memory(TrainerCallback):
    """Resident memory in bytes when training ends, and the highest since the last one that looked."""

    def on_train_end(self, args, state, control, **kwargs):
        gc.collect()
        status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        self.highest, self.now = (int(status[name].split()[0]) << 10 for name in ("VmHWM", "VmRSS"))
        Path("/proc/self/clear_refs").write_text("5")


def memory(folder: Path, backend: str, base: str) -> dict[str, Any]:
    """By how much memory grows while the agent is registered, and where nothing is."""
    torch.set_num_threads(2)
    os.environ["OMP_NUM_THREADS"] = "2"
    grown = {}
    for case in ("without", "with"):
        before, after = Memory(), Memory()
        callback = RAMRegistryCallback(str(folder / "registry"), agent="agent")
        callbacks = [before, callback, after] if case == "with" else [before, after]
        run = train(trainer(backend, base, DTYPES["bf16 weights"], folder, callbacks, max_steps=1))
        grown[case] = after.highest - before.now
    run.save_model(str(folder / "saved"))
    grown["error"] = None if callback.error is None else str(callback.error)
    return grown


def outcome(action: Callable[..., dict[str, Any]], *arguments) -> dict[str, Any]:
    try:
        return action(*arguments)
    except Exception as error:
        return {"raised": f"{type(error).__name__}: {error}"}
    finally:
        gc.collect()


def main() -> None:
    folder, cells = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    outcomes = []
    for number, (function, *arguments) in enumerate(cells):
        outcomes.append(outcome(globals()[function], folder / str(number), *arguments))
        (folder / f"outcomes-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(outcomes))
    # All is written. Once in some forty runs gloo's threads abort a process while it ends.
    os._exit(0)


if __name__ == "__main__":
    main()
