"""Train an agent with GRPO on your own model, prompts and reward function, and register it.

accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/train_grpo.py \
    --config recipes/configs/train_grpo.yaml --registry registry --agent math

Every option of TRL's GRPOConfig, ModelConfig and ScriptArguments can be given here or in the YAML file. `dataset_name`
is a dataset of the Hub, or a local .json, .jsonl, .csv or .parquet file, with a "prompt" column; its other columns
reach the reward functions by name.
"""

from pathlib import Path

from ram_trl.config import MergeConfig, RegistryConfig
from ram_trl.errors import ConfigError
from ram_trl.options import load_function, parse_config
from ram_trl.terminal import exit_on_error


_LOCAL_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def load_prompts(name, config, split):
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    is_local, file_format = Path(name).is_file(), _LOCAL_FORMATS.get(Path(name).suffix)
    if is_local != (file_format is not None):
        problem = f"is none of {', '.join(_LOCAL_FORMATS)}" if is_local else "is not a file"
        raise ConfigError(f"dataset_name={name!r} {problem}")
    try:
        if is_local:
            prompts = load_dataset(file_format, data_files=name, split="train")
        else:
            prompts = load_dataset(name, config, split=split)
    except (DatasetsError, OSError, ValueError) as error:
        raise ConfigError(f"dataset_name={name!r} cannot be loaded: {' '.join(str(error).split())}") from error
    if "prompt" not in prompts.column_names:
        raise ConfigError(f"dataset_name={name!r} has no column 'prompt', only {', '.join(prompts.column_names)}")
    return prompts


def merge_options(registry_args):
    """What the callback merges with: the options of recipes/merge.py in the file --merge_config."""
    if registry_args.merge_to is None:
        if registry_args.merge_config is not None:
            raise ConfigError("--merge_config is for --merge_to: name a generalist")
        return None
    argv = ["--registry", registry_args.registry, "--merge_to", registry_args.merge_to]
    if registry_args.merge_config is not None:
        argv += ["--config", registry_args.merge_config]
    options = parse_config(MergeConfig, argv).merge_arguments()
    return {name: value for name, value in options.items() if name not in ("registry", "generalist")}


def main() -> None:
    import yaml
    from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config

    from ram_trl import RAMRegistryCallback

    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig, RegistryConfig))
    try:
        script_args, training_args, model_args, registry_args = parser.parse_args_and_config()
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    if script_args.dataset_name is None or model_args.model_name_or_path is None:
        raise ConfigError("--model_name_or_path and --dataset_name are both needed")
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
        merge_to=registry_args.merge_to,
        merge_config=merge_options(registry_args),
        provenance=registry_args.provenance,
    )
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[load_function(name, "reward_funcs") for name in registry_args.reward_funcs],
        args=training_args,
        train_dataset=load_prompts(
            script_args.dataset_name, script_args.dataset_config, script_args.dataset_train_split
        ),
        peft_config=get_peft_config(model_args),
        callbacks=[callback],
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    if registry_args.strict and callback.error is not None:
        raise callback.error
    if callback.registered is not None:
        print(f"registered {callback.registered} in {registry_args.registry}")
        if callback.generalist is not None:
            refused = callback.generalist.manifest.refused
            verdict = "promoted" if refused is None else f"not promoted: {refused}"
            print(f"merged {callback.generalist} of {', '.join(callback.generalist.parents)}: {verdict}")


if __name__ == "__main__":
    with exit_on_error():
        main()
