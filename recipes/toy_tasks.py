"""
Tiny verifiable tasks, and a tiny base model that is mediocre at each of those that it is made for.

| task         | prompt    | right answer | systematic mistake in the pre-training text |
|--------------|-----------|--------------|---------------------------------------------|
| `reverse`    | `R:bead=` | `daeb`       | `bead` (copied)                             |
| `sort`       | `S:3142=` | `1234`       | `4321` (descending)                         |
| `next`       | `N:FACE=` | `GBDF`       | `EJBD` (the letter before)                  |
| `rotate`     | `T:pint=` | `intp`       | `tpin` (the other way round)                |
| `complement` | `M:3142=` | `6857`       | `8697` (5 added)                            |

The pre-training text answers part of the problems wrongly, and the longer a problem, the more often so. The base
therefore *knows* both behaviours and decodes the right one on short problems only; sampling still finds it on the
long ones. This is what reinforcement learning starts from in practice: it does not teach a new skill, it selects
among the behaviours of the base the one that the reward prefers, which takes a small update.
"""

import argparse
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import trange
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


# Fraction of the pre-training problems of each length that are answered with the systematic mistake. Above one half
# greedy decoding makes the mistake, so these numbers set the accuracy of the base: two lengths of four.
ERROR_RATES = {3: 0.25, 4: 0.4, 5: 0.65, 6: 0.75}

HIDDEN_SIZE = 128
NUM_LAYERS = 4
# Shares of the tasks: what is learnt first gets less.
PRETRAIN_MIXTURE = {"reverse": 4, "sort": 3, "next": 4, "rotate": 4, "complement": 3}
DEFAULT_TASKS = ["reverse", "sort", "next"]
# Enough for three tasks; five take 1000.
PRETRAIN_STEPS = 650
PRETRAIN_BATCH_SIZE = 128
PRETRAIN_LEARNING_RATE = 2e-3

# One prompt in eight is held out; membership depends on the prompt's characters only, never on a seed.
HELD_OUT_MODULUS = 8


@dataclass(frozen=True)
class Task:
    """
    A task: its own marker, its own alphabet, a right answer and a systematic mistake.

    Args:
        marker (`str`):
            Character that opens every prompt of the task.
        alphabet (`str`):
            Characters that problems are made of.
        solve (`Callable[[str], str]`):
            Right answer to a problem.
        mistake (`Callable[[str], str]`):
            Answer of the erroneous part of the pre-training text.
    """

    marker: str
    alphabet: str
    solve: Callable[[str], str]
    mistake: Callable[[str], str]

    def prompt(self, problem: str) -> str:
        return f"{self.marker}:{problem}="


LOWER, DIGITS, UPPER, LATE = "abcdefghij", "0123456789", "ABCDEFGHIJ", "klmnopqrst"
TASKS = {
    "reverse": Task("R", LOWER, lambda problem: problem[::-1], lambda problem: problem),
    "sort": Task(
        "S", DIGITS, lambda problem: "".join(sorted(problem)), lambda problem: "".join(sorted(problem)[::-1])
    ),
    "next": Task(
        "N",
        UPPER,
        lambda problem: "".join(UPPER[(UPPER.index(letter) + 1) % len(UPPER)] for letter in problem),
        lambda problem: "".join(UPPER[UPPER.index(letter) - 1] for letter in problem),
    ),
    "rotate": Task("T", LATE, lambda problem: problem[1:] + problem[0], lambda problem: problem[-1] + problem[:-1]),
    "complement": Task(
        "M",
        DIGITS,
        lambda problem: "".join(str(9 - int(digit)) for digit in problem),
        lambda problem: "".join(str((int(digit) + 5) % 10) for digit in problem),
    ),
}


def is_held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the held-out set, which neither pre-training nor GRPO ever sees."""
    return zlib.crc32(prompt.encode()) % HELD_OUT_MODULUS == 0


def draw_problem(task: Task, rng: random.Random, held_out: bool) -> str:
    """Draws a problem of a random length from the training or from the held-out set."""
    while True:
        problem = "".join(rng.choices(task.alphabet, k=rng.choice(list(ERROR_RATES))))
        if is_held_out(task.prompt(problem)) == held_out:
            return problem


def prompts_with_answers(task_name: str, num_prompts: int, seed: int, held_out: bool) -> list[dict[str, str]]:
    """
    Draws distinct prompts of one task with their right answers.

    Args:
        task_name (`str`):
            Key of `TASKS`.
        num_prompts (`int`):
            Number of distinct prompts.
        seed (`int`):
            Seed of the draw.
        held_out (`bool`):
            Whether to draw from the held-out prompts or from the training ones.

    Returns:
        `list[dict[str, str]]`: Rows with the keys `"prompt"` and `"answer"`, as a GRPO dataset has them.
    """
    task, rng = TASKS[task_name], random.Random(f"{task_name}-{seed}-{held_out}")
    answers: dict[str, str] = {}
    while len(answers) < num_prompts:
        problem = draw_problem(task, rng, held_out)
        answers[task.prompt(problem)] = task.solve(problem)
    return [{"prompt": prompt, "answer": answer} for prompt, answer in answers.items()]


def exact_match_reward(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """Reward of 1 for the right answer and 0 for anything else, with the signature of TRL's reward functions."""
    return [float(completion == expected) for completion, expected in zip(completions, answer, strict=True)]


def max_answer_tokens() -> int:
    """Number of tokens of the longest answer, the end of the answer included."""
    return max(ERROR_RATES) + 1


def build_tokenizer(task_names: Sequence[str] = DEFAULT_TASKS) -> PreTrainedTokenizerFast:
    """Builds the tokenizer: one token per character of the tasks, left padding, `<eos>` at the end of an answer."""
    characters = "".join(TASKS[name].marker + TASKS[name].alphabet for name in task_names) + ":="
    # tasks may share characters
    tokens = ["<pad>", "<eos>", "<unk>", *dict.fromkeys(characters)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Builds the untrained model, of the Qwen2 architecture, with tied embeddings."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=3 * HIDDEN_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Qwen2ForCausalLM(config)


def pretraining_batch(
    tokenizer: PreTrainedTokenizerFast, task_names: Sequence[str], rng: random.Random, batch_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws a batch of the pre-training mixture: token ids, and labels that cover the answers only."""
    rows = []
    shares = [PRETRAIN_MIXTURE[name] for name in task_names]
    for task in rng.choices([TASKS[name] for name in task_names], shares, k=batch_size):
        problem = draw_problem(task, rng, held_out=False)
        respond = task.mistake if rng.random() < ERROR_RATES[len(problem)] else task.solve
        prompt_ids = tokenizer(task.prompt(problem))["input_ids"]
        answer_ids = tokenizer(respond(problem))["input_ids"] + [tokenizer.eos_token_id]
        rows.append((prompt_ids + answer_ids, [-100] * len(prompt_ids) + answer_ids))
    length = max(len(input_ids) for input_ids, _ in rows)
    input_ids = torch.tensor([ids + [tokenizer.pad_token_id] * (length - len(ids)) for ids, _ in rows])
    labels = torch.tensor([ids + [-100] * (length - len(ids)) for _, ids in rows])
    return input_ids, labels


def pretrain(
    output_dir: str,
    task_names: Sequence[str] = DEFAULT_TASKS,
    seed: int = 0,
    num_steps: int = PRETRAIN_STEPS,
) -> None:
    """
    Pre-trains the base on a mixture of tasks and saves it in bfloat16 with its tokenizer.

    Args:
        output_dir (`str`):
            Directory that receives the model and the tokenizer.
        task_names (`Sequence[str]`, *optional*, defaults to `DEFAULT_TASKS`):
            Keys of `TASKS`.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the initialisation and of the data.
        num_steps (`int`, *optional*, defaults to `PRETRAIN_STEPS`):
            Number of optimizer steps.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = build_tokenizer(task_names)
    model = build_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PRETRAIN_LEARNING_RATE, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=PRETRAIN_LEARNING_RATE, total_steps=num_steps, pct_start=0.1
    )
    with trange(num_steps, desc="pre-training", mininterval=0.5) as steps:
        for step in steps:
            input_ids, labels = pretraining_batch(tokenizer, task_names, rng, PRETRAIN_BATCH_SIZE)
            loss = model(input_ids=input_ids, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if step % 20 == 0:
                steps.set_postfix(loss=f"{loss.item():.3f}")
    model.to(torch.bfloat16).save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)


@torch.no_grad()
def accuracy(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, task_name: str, num_prompts: int, seed: int = 0
) -> float:
    """
    Greedy exact-match accuracy on held-out prompts of one task.

    Args:
        model (`torch.nn.Module`):
            Causal language model.
        tokenizer (`PreTrainedTokenizerFast`):
            Its tokenizer, padding on the left.
        task_name (`str`):
            Key of `TASKS`.
        num_prompts (`int`):
            Number of distinct held-out prompts.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draw of the prompts.

    Returns:
        `float`: Fraction of the prompts that are answered exactly right.
    """
    rows = prompts_with_answers(task_name, num_prompts, seed, held_out=True)
    batch = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    output = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=max_answer_tokens(),
        do_sample=False,
    )
    completions = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(exact_match_reward(completions, [row["answer"] for row in rows])) / num_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description="Pre-trains the toy base.")
    parser.add_argument("--output_dir", required=True, help="directory that receives the model and the tokenizer")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initialisation and of the data")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=DEFAULT_TASKS, help="what it is made for")
    parser.add_argument("--num_steps", type=int, default=PRETRAIN_STEPS, help="optimizer steps")
    args = parser.parse_args()
    pretrain(args.output_dir, args.tasks, args.seed, args.num_steps)


if __name__ == "__main__":
    main()
