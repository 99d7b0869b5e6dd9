"""Estimate the diagonal Fisher information of a registered agent, which recipes/merge.py --method fisher needs.

accelerate launch recipes/fisher.py --registry registry --agent math --dataset math.jsonl

The dataset is a local JSON, JSON lines or Parquet file with columns `prompt` and `completion` (the completion counts;
text, or messages as TRL has them) or `text`: examples of what the agent should do, best its own good answers. It is
the empirical Fisher information, that of the examples' own labels. Every process holds the model in float32 with its
gradients and a sum of their size: 12 bytes a parameter.
"""

from dataclasses import dataclass, field

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


def main() -> None:
    with exit_on_error(OSError, UnicodeError):
        config = parse_config(FisherConfig, description="Estimate the Fisher information of a registered agent.")
        import torch
        from accelerate import Accelerator
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from ram_trl.distributed import current_world, leave_world
        from ram_trl.evaluating.fisher import estimate_fisher, read_examples
        from ram_trl.storage.base_model import open_recorded_base
        from ram_trl.storage.registry import AgentRegistry

        accelerator = Accelerator(cpu=config.cpu)
        world, registry = current_world(), AgentRegistry(config.registry)

        def prepare():
            agent = registry.get(config.agent)
            base = open_recorded_base(agent, config.base_model).path
            tokenizer = AutoTokenizer.from_pretrained(base)
            examples = read_examples(config.dataset, tokenizer, config.num_examples, config.max_length)
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
