"""
Trains one toy agent with GRPO and registers it: the user's first moment, with nothing left out.

```sh
python recipes/toy_agent.py --task reverse --base_model quickstart/base --registry quickstart/registry \
    --output_dir quickstart/runs/reverse
```
"""

import argparse

from datasets import Dataset
from peft import LoraConfig
from toy_tasks import TASKS, exact_match_reward, max_answer_tokens, prompts_with_answers
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from ram_trl import RAMRegistryCallback


MAX_STEPS = 100
BATCH_SIZE = 64
NUM_GENERATIONS = 8
NUM_PROMPTS = 4000

# Plain SGD: AdamW normalises every coordinate, so at the learning rate that a network of this size needs, it moves
# all of them. SGD leaves the coordinates with small gradients below the resolution of bfloat16, and the update comes
# out as sparse as that of a large model, without loss of reward (huggingface.co/papers/2602.07729).
SGD_LEARNING_RATE = 2e-2

# The adapter trains with TRL's default optimizer: its update is as sparse as the choice of modules makes it.
LORA_LEARNING_RATE = 4e-4
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), required=True, help="task that the agent is rewarded on")
    parser.add_argument("--base_model", required=True, help="directory of the base model, as toy_tasks.py writes it")
    parser.add_argument("--registry", required=True, help="registry that receives the agent")
    parser.add_argument("--agent", help="name of the agent in the registry (default: the task)")
    parser.add_argument("--output_dir", required=True, help="output directory of the trainer")
    parser.add_argument("--lora", action="store_true", help="train a LoRA adapter instead of all the weights")
    parser.add_argument("--optim", help="optimizer (default: sgd, with --lora adamw_torch)")
    parser.add_argument("--learning_rate", type=float, help="its learning rate (default: one that suits the default)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="dtype of the weights (default: TRL's)")
    parser.add_argument("--max_steps", type=int, default=MAX_STEPS, help="optimizer steps")
    parser.add_argument("--merge_to", help="generalist that the registry's agents are merged into after the training")
    parser.add_argument("--gate", help="MODULE:FUNCTION that promotes or refuses what was merged")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts and of the rollouts")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    # TRL's defaults hold wherever nothing is said: float32 weights under bfloat16 autocast, no KL term, linear decay.
    config = GRPOConfig(
        output_dir=args.output_dir,
        use_cpu=True,
        seed=args.seed,
        max_steps=args.max_steps,
        per_device_train_batch_size=BATCH_SIZE,
        num_generations=NUM_GENERATIONS,
        max_completion_length=max_answer_tokens(),
        learning_rate=args.learning_rate or (LORA_LEARNING_RATE if args.lora else SGD_LEARNING_RATE),
        optim=args.optim or ("adamw_torch" if args.lora else "sgd"),
        model_init_kwargs={"dtype": args.dtype} if args.dtype else None,
        gradient_checkpointing=False,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=args.base_model,
        reward_funcs=exact_match_reward,
        args=config,
        train_dataset=Dataset.from_list(prompts_with_answers(args.task, NUM_PROMPTS, args.seed, held_out=False)),
        processing_class=AutoTokenizer.from_pretrained(args.base_model),
        peft_config=LORA if args.lora else None,
        # strict: here a run that cannot be registered has failed; by default the callback never costs a run.
        callbacks=[
            RAMRegistryCallback(
                args.registry,
                agent=args.agent or args.task,
                base_model=args.base_model,
                merge_to=args.merge_to,
                merge_config={"gate": args.gate} if args.merge_to else None,
                strict=True,
            )
        ],
    )
    trainer.train()


if __name__ == "__main__":
    main()
