"""Train an agent with GRPO on your own model, prompts and reward function, and register it.

accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/train_grpo.py \
    --config recipes/configs/train_grpo.yaml --registry registry --agent math

Every option of TRL's GRPOConfig, ModelConfig and ScriptArguments can be given here or in the YAML file. `dataset_name`
is a dataset of the Hub, or a local .json, .jsonl, .csv or .parquet file with a "prompt" column. Its other columns
reach the reward functions by name.
"""

import importlib
import os
import sys
from pathlib import Path

from ram_trl.config import RegistryConfig


_LOCAL_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def load_prompts(script_args):
    from datasets import load_dataset

    name = script_args.dataset_name
    if Path(name).is_file():
        return load_dataset(_LOCAL_FORMATS[Path(name).suffix], data_files=name, split="train")
    return load_dataset(name, script_args.dataset_config, split=script_args.dataset_train_split)


def load_reward(name):
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    return getattr(importlib.import_module(module), function)


def main() -> None:
    from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config

    from ram_trl import RAMRegistryCallback

    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig, RegistryConfig))
    script_args, training_args, model_args, registry_args = parser.parse_args_and_config()
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
        **(training_args.model_init_kwargs or {}),
    }
    callback = RAMRegistryCallback(
        registry_args.registry,
        agent=registry_args.agent,
        base_model=registry_args.registry_base_model,
        revision=model_args.model_revision if registry_args.registry_base_model is None else None,
        snapshot_dtype=registry_args.snapshot_dtype,
        epsilon=registry_args.snapshot_epsilon,
        strict=registry_args.strict,
    )
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[load_reward(name) for name in registry_args.reward_funcs],
        args=training_args,
        train_dataset=load_prompts(script_args),
        peft_config=get_peft_config(model_args),
        callbacks=[callback],
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    if trainer.accelerator.is_main_process and callback.registered is not None:
        print(f"registered {callback.registered} in {registry_args.registry}")


if __name__ == "__main__":
    main()
