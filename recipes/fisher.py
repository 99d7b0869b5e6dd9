"""Estimate the diagonal Fisher information of a registered agent, which recipes/merge.py --method fisher needs.

accelerate launch recipes/fisher.py --registry registry --agent math --dataset math.jsonl

The dataset is a local JSON, JSON lines or Parquet file with columns `prompt` and `completion` (the completion counts)
or `text`: examples of what the agent should do, best its own good answers. Every process holds the model in float32
with its gradients and a sum of their size: 12 bytes a parameter.
"""

from dataclasses import dataclass, field

from ram_trl.errors import ConfigError
from ram_trl.options import parse_config
from ram_trl.terminal import exit_on_error


@dataclass(kw_only=True)
class FisherConfig:
    """Options; the fields are described by their help."""

    registry: str = field(metadata={"help": "Directory of the registry."})
    agent: str = field(metadata={"help": "Agent: NAME (its latest version) or NAME@v2."})
    dataset: str = field(metadata={"help": "JSON, JSON lines or Parquet file: prompt and completion, or text."})
    num_examples: int = field(default=1024, metadata={"help": "Use the first so many examples. Default: 1024."})
    max_length: int = field(default=2048, metadata={"help": "Tokens of an example; the rest is cut. Default: 2048."})
    base_model: str | None = field(
        default=None, metadata={"help": "Where the base model is now, if not where it was."}
    )
    cpu: bool = field(default=False, metadata={"help": "On the CPU even if there is a GPU."})


def read_examples(config, tokenizer):
    """Token ids and labels of the first examples."""
    from datasets import load_dataset

    from ram_trl.evaluating.fisher import IGNORED

    kind = "parquet" if config.dataset.endswith(".parquet") else "json"
    rows = load_dataset(kind, data_files=config.dataset, split="train")
    is_pair = {"prompt", "completion"} <= set(rows.column_names)
    if not is_pair and "text" not in rows.column_names:
        raise ConfigError(f"{config.dataset} has columns {rows.column_names}, not prompt and completion, nor text")
    examples = []
    for row in rows.select(range(min(config.num_examples, len(rows)))):
        prompt = tokenizer(row["prompt"])["input_ids"] if is_pair else []
        answer = tokenizer(row["completion" if is_pair else "text"], add_special_tokens=not is_pair)["input_ids"]
        tokens, labels = prompt + answer, [IGNORED] * len(prompt) + answer
        # the first token is not predicted from anything
        if any(label != IGNORED for label in labels[1 : config.max_length]):
            examples.append((tokens[: config.max_length], labels[: config.max_length]))
    if not examples:
        raise ConfigError(f"{config.dataset} has no example with a token to predict")
    return examples


def main() -> None:
    with exit_on_error(OSError, UnicodeError):
        config = parse_config(FisherConfig, description="Estimate the Fisher information of a registered agent.")
        import torch
        from accelerate import Accelerator
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from ram_trl.distributed import current_world, leave_world
        from ram_trl.evaluating.fisher import estimate_fisher
        from ram_trl.storage.base_model import open_recorded_base
        from ram_trl.storage.registry import AgentRegistry

        accelerator = Accelerator(cpu=config.cpu)
        world, registry = current_world(), AgentRegistry(config.registry)

        def prepare():
            agent = registry.get(config.agent)
            base = open_recorded_base(agent, config.base_model).path
            examples = read_examples(config, AutoTokenizer.from_pretrained(base))
            return agent, examples, AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)

        agent, examples, model = world.run(prepare)
        path = estimate_fisher(
            registry,
            agent,
            model.to(accelerator.device),
            examples,
            base_model=config.base_model,
            world=world,
            add_up=lambda values: accelerator.reduce(values, reduction="sum"),
        )
        if world.is_main:
            print(f"Fisher information of {agent} from {len(examples):,} examples: {path}")
        leave_world()


if __name__ == "__main__":
    main()
