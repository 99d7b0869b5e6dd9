"""The diagonal empirical Fisher information of an agent, from a user's examples: the mean square of their gradients.

Empirical: of the log-likelihood of the examples' own labels, not of what the model would say.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..arithmetic.codec import is_mergeable
from ..distributed import World
from ..errors import ConfigError, NonFiniteError, UnsupportedModelError
from ..storage.base_model import open_recorded_base
from ..storage.fisher import FISHER, FisherManifest, FisherStore
from ..storage.registry import AgentRegistry, RegisteredAgent
from ..storage.stream_writer import StreamWriter
from ..version import __version__
from .generation import is_conversation
from .in_place import apply_agent


__all__ = ["IGNORED", "estimate_fisher", "read_examples", "squared_gradients"]

# Label of a token that does not count, as transformers has it.
IGNORED = -100

_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}

Example = tuple[list[int], list[int]]


def estimate_fisher(
    registry: AgentRegistry,
    agent: RegisteredAgent,
    model: nn.Module,
    examples: Sequence[Example],
    *,
    base_model: str | None,
    world: World,
    add_up: Callable[[Tensor], Tensor],
) -> str:
    """Estimate the Fisher information of an agent and store it beside it. All ranks call it.

    Args:
        registry ([`AgentRegistry`]):
            The registry.
        agent ([`RegisteredAgent`]):
            The agent.
        model (`nn.Module`):
            The agent's base, a causal language model in float32, on this rank's device; it is the base again
            afterwards.
        examples (`Sequence[tuple[list[int], list[int]]]`):
            Token ids and labels of all examples; the ranks share them out.
        base_model (`str`, *optional*):
            Where the base model's files are now, if not where they were.
        world ([`~ram_trl.distributed.World`]):
            The processes.
        add_up (`Callable[[Tensor], Tensor]`):
            Sum of a tensor over the ranks.

    Returns:
        `str`: the directory that holds it.

    Raises:
        UnsupportedModelError: if parameters of the model have other names or shapes than the base's tensors.
        NonFiniteError: if it holds NaN or infinity, as the model or an example gives it.
    """
    store = FisherStore(registry)
    base = world.run(lambda: open_recorded_base(agent, base_model))
    records = agent.tensors()
    wanted = {
        info.name: info.shape
        for info in base.tensors.values()
        if records[info.name].tied_to is None and is_mergeable(info.dtype)
    }

    def estimate() -> dict[str, Tensor]:
        store.check_absent(agent)
        found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        for name, shape in wanted.items():
            if found.get(name) != shape:
                raise UnsupportedModelError(
                    f"tensor {name!r} of {base.name} is no parameter of the loaded model, which splits or fuses its "
                    "weights: its Fisher information is not supported"
                )
        with apply_agent(model, registry, str(agent), base_model=base_model):
            return squared_gradients(model, examples[world.rank :: world.size])

    sums = world.run(estimate)
    means = {name: (add_up(sums[name]).cpu() / len(examples)).to(torch.bfloat16) for name in wanted}

    def write() -> str:
        for name, mean in means.items():
            if not mean.isfinite().all():
                raise NonFiniteError(
                    f"the Fisher of agent {agent} over {len(examples):,} examples has NaN or infinity in tensor "
                    f"{name!r}, so nothing was stored: look at the agent (did its training diverge?) and the examples"
                )
        with store.stage(agent) as staged:
            writer = StreamWriter(staged / FISHER, wanted, {"format": "pt"})
            for name, mean in means.items():
                writer.write(name, mean)
            writer.close()
            manifest = FisherManifest(
                agent=str(agent),
                agent_digest=agent.digest,
                examples=len(examples),
                created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                ram_trl_version=__version__,
            )
            return str(store.commit(staged, agent, manifest))

    return world.run_on_main(write)


def squared_gradients(model: nn.Module, examples: Sequence[Example]) -> dict[str, Tensor]:
    """Sums over examples, one by one, of the squared gradient of the log-likelihood of the labels.

    Args:
        model (`nn.Module`):
            A causal language model.
        examples (`Sequence[tuple[list[int], list[int]]]`):
            Token ids and labels; a label of `IGNORED` does not count.

    Returns:
        `dict[str, Tensor]`: by the name of the parameter, in its shape, float32, on its device.
    """
    model.eval()
    sums = {name: torch.zeros_like(parameter, dtype=torch.float32) for name, parameter in model.named_parameters()}
    device = next(model.parameters()).device
    for tokens, labels in examples:
        model.zero_grad(set_to_none=True)
        logits = model(input_ids=torch.tensor([tokens], device=device)).logits[0, :-1].float()
        targets = torch.tensor(labels[1:], device=device)
        nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum").backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                sums[name].addcmul_(parameter.grad, parameter.grad)
    model.zero_grad(set_to_none=True)
    return sums


def read_examples(path: str, tokenizer: PreTrainedTokenizerBase, num_examples: int, max_length: int) -> list[Example]:
    """Token ids and labels of the first examples of a file.

    Args:
        path (`str`):
            A .json, .jsonl or .parquet file with columns `prompt` and `completion`, both text or both messages
            (of which the completion counts), or `text`.
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer; messages go through its chat template.
        num_examples (`int`):
            So many of its first rows.
        max_length (`int`):
            Tokens of an example; the rest is cut.

    Raises:
        ConfigError: if the file cannot be read, or a row is no example.
    """
    from datasets import load_dataset

    kind = _FORMATS.get(Path(path).suffix)
    if kind is None:
        raise ConfigError(f"{path} is none of {', '.join(_FORMATS)}")
    try:
        rows = load_dataset(kind, data_files=path, split="train")
    except Exception as error:
        # the readers of files raise errors of their own libraries
        cause = error.__cause__ or error
        problem = " ".join(f"{type(cause).__name__}: {cause}".split())
        raise ConfigError(f"{path} cannot be read: {problem}") from error
    is_pair = {"prompt", "completion"} <= set(rows.column_names)
    if not is_pair and "text" not in rows.column_names:
        raise ConfigError(f"{path} has columns {rows.column_names}, not prompt and completion, nor text")
    examples = []
    for number, row in enumerate(rows.select(range(min(num_examples, len(rows)))), start=1):
        tokens, labels = _tokens(row, is_pair, tokenizer, f"row {number} of {path}")
        # the first token is not predicted from anything
        if any(label != IGNORED for label in labels[1:max_length]):
            examples.append((tokens[:max_length], labels[:max_length]))
    if not examples:
        raise ConfigError(f"{path} has no example with a token to predict")
    return examples


def _tokens(row: Mapping[str, Any], is_pair: bool, tokenizer: PreTrainedTokenizerBase, where: str) -> Example:
    prompt, answer = (row["prompt"], row["completion"]) if is_pair else ("", row["text"])
    is_chat = is_conversation(prompt) and is_conversation(answer)
    if is_chat:
        prompt, answer = _rendered(prompt, answer, tokenizer, where)
    if not isinstance(prompt, str) or not isinstance(answer, str):
        expected = "text, nor both messages: give both columns in one form" if is_pair else "text"
        found = [row["prompt"], row["completion"]] if is_pair else row["text"]
        raise ConfigError(f"{where} is not {expected}: {str(found)[:80]}")
    # a chat template writes all special tokens itself
    before = tokenizer(prompt, add_special_tokens=not is_chat)["input_ids"] if is_pair else []
    counted = tokenizer(answer, add_special_tokens=not is_pair)["input_ids"]
    return before + counted, [IGNORED] * len(before) + counted


def _rendered(
    prompt: list[dict[str, Any]], answer: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[str, str]:
    """Messages as text, as TRL makes it: the prompt that a completion would be generated from, and what follows it."""
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise ConfigError(f"{where} holds messages, but the base's tokenizer has no chat template: give text")
    is_begun = prompt[-1]["role"] == "assistant"
    try:
        begun = tokenizer.apply_chat_template(
            prompt, tokenize=False, add_generation_prompt=not is_begun, continue_final_message=is_begun
        )
        whole = tokenizer.apply_chat_template(prompt + answer, tokenize=False)
    except (TemplateError, TypeError, ValueError) as error:
        raise ConfigError(f"{where} does not fit the chat template of the base's tokenizer: {error}") from error
    # some templates write an earlier turn in another way than the last one
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(begun, whole, strict=False))
    shared = sum(1 for _ in equal)
    return whole[:shared], whole[shared:]
