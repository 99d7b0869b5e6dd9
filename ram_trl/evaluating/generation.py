"""Completions of prompts: greedy, or sampled so that a sample depends on its prompt and the seed alone."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..errors import ConfigError
from .tasks import PerplexityTask, RewardTask


__all__ = [
    "TransformersGenerator",
    "explain_out_of_memory",
    "is_conversation",
    "max_positions",
    "prompt_tokens",
    "render_messages",
    "sample_seed",
]


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, prompt: Any, task: RewardTask | PerplexityTask) -> list[int]:
    """Tokens of a prompt, as TRL's GRPOTrainer makes them: text as it is, messages through the chat template.

    Other than there, a message of the assistant at the end is continued.

    Raises:
        ConfigError: if it is neither text nor messages, or the chat template cannot render it.
    """
    if isinstance(prompt, str):
        tokens = tokenizer(prompt)["input_ids"]
    elif is_conversation(prompt):
        is_begun = prompt[-1]["role"] == "assistant"
        tokens = render_messages(
            tokenizer, prompt, task, add_generation_prompt=not is_begun, continue_final_message=is_begun
        )
    else:
        raise ConfigError(f"task {task.name}: a prompt is neither text nor messages: {str(prompt)[:80]!r}")
    if not tokens:
        raise ConfigError(f"task {task.name}: a prompt is empty")
    return tokens


def render_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    task: RewardTask | PerplexityTask,
    **options: Any,
) -> list[int]:
    """Tokens of messages, through the chat template of the tokenizer.

    Raises:
        ConfigError: if there is no chat template, or it cannot render them with the task's `chat_template_kwargs`.
    """
    if tokenizer.chat_template is None:
        raise ConfigError(f"task {task.name}: prompts are messages, but the base's tokenizer has no chat template")
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, **options, **task.chat_template_kwargs
        )["input_ids"]
    except Exception as error:
        # a template is a program of the model's makers, and can raise anything
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        given = f" with chat_template_kwargs={task.chat_template_kwargs}" if task.chat_template_kwargs else ""
        raise ConfigError(
            f"task {task.name}: the base's chat template cannot render {str(messages)[:80]!r}{given}: {problem}"
        ) from error


def is_conversation(prompt: Any) -> bool:
    """Whether a prompt is a list of messages."""
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(m, dict) and "role" in m for m in prompt)


def sample_seed(seed: int, task: str, prompt: int, sample: int) -> int:
    """Seed of one sample of one prompt, a number below 2**63."""
    digest = blake3(f"{seed}/{task}/{prompt}/{sample}".encode()).digest(length=8)
    return int.from_bytes(digest, "little") >> 1


def max_positions(model: PreTrainedModel) -> int | None:
    """Tokens that a model can read at most, if its configuration says so."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


@contextmanager
def explain_out_of_memory(batch_size: int | None = None) -> Iterator[None]:
    """Turn a lack of the device's memory into a [`ConfigError`] that names the cure; without batches, of the model."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        batches = "" if batch_size is None else f"lower --batch_size ({batch_size}), or "
        raise ConfigError(
            f"out of memory on the device: {batches}spread the model over the GPUs: --device_map auto"
        ) from error


class TransformersGenerator:
    """Generates with a loaded model of transformers, in batches padded on the left.

    Of the model's own generation configuration only the end-of-sequence tokens are used.

    Args:
        model (`PreTrainedModel`):
            The model, on one or several devices.
        tokenizer (`PreTrainedTokenizerBase`):
            Its tokenizer.
        batch_size (`int`):
            Completions that are generated at a time.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int):
        self._model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.max_length = max_positions(model)
        self._ends = _end_tokens(model, tokenizer)
        self._padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self._ends[0]

    def generate(self, prompts: Sequence[list[int]], seeds: Sequence[int], task: RewardTask) -> list[list[int]]:
        """Complete a batch.

        Args:
            prompts (`Sequence[list[int]]`):
                Tokens of the prompts.
            seeds (`Sequence[int]`):
                Seed of each completion.
            task ([`~ram_trl.evaluating.tasks.RewardTask`]):
                How to decode.

        Returns:
            `list[list[int]]`: tokens of the completions, the one that ends them included.
        """
        length, device = max(map(len, prompts)), self._model.device
        tokens = torch.full((len(prompts), length), self._padding)
        mask = torch.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            tokens[row, length - len(prompt) :] = torch.tensor(prompt)
            mask[row, length - len(prompt) :] = 1
        config = GenerationConfig(
            max_new_tokens=task.max_new_tokens,
            # sampling is done by the processors
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            pad_token_id=self._padding,
            eos_token_id=self._ends,
        )
        self._model.eval()
        with explain_out_of_memory(self.batch_size):
            output = self._model.generate(
                input_ids=tokens.to(device),
                attention_mask=mask.to(device),
                generation_config=config,
                logits_processor=_sampling(task, seeds, device),
            )
        return [self._cut(row) for row in output[:, length:].tolist()]

    def _cut(self, completion: list[int]) -> list[int]:
        for position, token in enumerate(completion):
            if token in self._ends:
                return completion[: position + 1]
        return completion


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    own = model.generation_config.eos_token_id if model.generation_config is not None else None
    ends = own if isinstance(own, list) else [own]
    ends = [token for token in ends if token is not None]
    if not ends and tokenizer.eos_token_id is not None:
        ends = [tokenizer.eos_token_id]
    if not ends:
        raise ConfigError("neither the base's generation_config.json nor its tokenizer names an end-of-sequence token")
    return ends


def _sampling(task: RewardTask, seeds: Sequence[int], device: torch.device) -> LogitsProcessorList:
    """Sampling as a change of the scores after which the largest is taken."""
    if task.temperature == 0:
        return LogitsProcessorList()
    steps = [TemperatureLogitsWarper(task.temperature)]
    steps += [TopKLogitsWarper(task.top_k)] if task.top_k else []
    steps += [TopPLogitsWarper(task.top_p)] if task.top_p < 1 else []
    return LogitsProcessorList([*steps, _GumbelNoise(seeds, device)])


class _GumbelNoise(LogitsProcessor):
    """Adds Gumbel noise to log-probabilities: their largest is then a sample of the distribution.

    Every row draws from a generator of its own, so that it does not matter what else is in the batch.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device):
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        noise = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
        for row, generator in zip(noise, self._generators, strict=True):
            # an exponential variable E; -log(E) is Gumbel's
            row.exponential_(generator=generator)
        return scores.float() - noise.clamp_min_(torch.finfo(torch.float32).tiny).log_()
