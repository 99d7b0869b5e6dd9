"""Evaluation by perplexity: how likely a model finds the texts of a dataset."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..distributed import World
from ..errors import ConfigError
from ..progress import Progress
from .data import load_examples
from .generation import explain_out_of_memory, is_conversation, max_positions, prompt_tokens, render_messages
from .statistics import Measurement
from .tasks import PerplexityTask


__all__ = ["PerplexityEvaluation"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Text:
    """Tokens of an example, the first that counts, and whether some were cut off."""

    tokens: list[int]
    start: int
    is_cut: bool

    @property
    def count(self) -> int:
        return max(0, len(self.tokens) - self.start)


class PerplexityEvaluation:
    """A task by perplexity, its dataset loaded.

    Args:
        task ([`~ram_trl.evaluating.tasks.PerplexityTask`]):
            The task.

    Raises:
        ConfigError: if the dataset cannot be had.
    """

    def __init__(self, task: PerplexityTask):
        self.task = task
        rows = load_examples(task, task.perplexity)
        columns = ["text"] if "text" in rows.column_names else ["prompt", "completion"]
        if not set(columns) <= set(rows.column_names):
            raise ConfigError(
                f"task {task.name}: dataset {task.perplexity!r} has neither a column 'text' nor 'prompt' and "
                f"'completion', only {', '.join(rows.column_names)}"
            )
        self._rows: list[dict[str, Any]] = rows.select_columns(columns).to_list()
        self._is_told = False
        # kept from the first call: every row is read as the base's tokenizer cuts it
        self._texts: list[_Text] | None = None
        # changes when the dataset does
        self.fingerprint = blake3(repr(self._rows).encode()).hexdigest()

    def run(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        world: World,
        progress: Progress | None,
    ) -> tuple[dict[str, Measurement], list[dict[str, Any]]]:
        """Evaluate a model. All ranks call it; each reads its share of the batches.

        The texts are cut into tokens once: the tokenizer and the model's positions are the same in every call.
        Batches are the same whatever the number of processes: examples by length, the longest first.

        Returns:
            `tuple[dict[str, Measurement], list[dict]]`: on every rank, `perplexity` and `loss`; and of every example
            its mean loss and the number of tokens that it is over.
        """
        if self._texts is None:
            self._texts = world.run(lambda: self._tokenize(tokenizer, max_positions(model)))
        texts = self._texts
        local = world.run(lambda: self._sums(texts, model, batch_size, world, progress))
        sums = {number: loss for part in world.gather(local) for number, loss in part.items()}
        counts = [text.count for text in texts]
        self._tell_of_cuts(sum(text.is_cut for text in texts), world)
        records = [
            {
                **row,
                "loss": sums[number] / text.count if text.count and math.isfinite(sums[number]) else None,
                "tokens": text.count,
                "cut": text.is_cut,
            }
            for number, (row, text) in enumerate(zip(self._rows, texts, strict=True))
        ]
        return _measurements([sums[number] for number in range(len(texts))], counts), records

    def _tell_of_cuts(self, number: int, world: World) -> None:
        """Once, not for every model."""
        if number and world.is_main and not self._is_told:
            logger.warning(
                "task %s: %d of %d examples are longer than the tokens that are read, and cut off",
                self.task.name,
                number,
                len(self._rows),
            )
            self._is_told = True

    def _tokenize(self, tokenizer: PreTrainedTokenizerBase, positions: int | None) -> list[_Text]:
        longest = min(self.task.max_length, positions or self.task.max_length)
        texts = []
        for row in self._rows:
            tokens, start = self._tokens(tokenizer, row)
            # nothing comes before the first token, so nothing predicts it
            texts.append(_Text(tokens[:longest], max(start, 1), len(tokens) > longest))
        return texts

    def _tokens(self, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> tuple[list[int], int]:
        """Tokens of an example, and how many of the first ones its prompt has alone."""
        task = self.task
        texts = [row["text"]] if "text" in row else [row["prompt"], row["completion"]]
        if all(isinstance(text, str) for text in texts):
            tokens = tokenizer("".join(texts))["input_ids"]
            prompt = tokenizer(texts[0])["input_ids"] if len(texts) > 1 else []
        elif len(texts) > 1 and all(map(is_conversation, texts)):
            prompt = prompt_tokens(tokenizer, texts[0], task)
            messages = [*texts[0], *texts[1]]
            tokens = render_messages(tokenizer, messages, task)
        else:
            raise ConfigError(
                f"task {task.name}: an example is neither text nor messages throughout: {str(texts)[:80]}"
            )
        pairs = enumerate(zip(prompt, tokens, strict=False))
        return tokens, next((at for at, (one, other) in pairs if one != other), min(len(prompt), len(tokens)))

    def _sums(
        self, texts: Sequence[_Text], model: PreTrainedModel, batch_size: int, world: World, progress: Progress | None
    ) -> dict[int, float]:
        """Sum of the losses of the tokens that count, by the number of the example."""
        order = sorted(range(len(texts)), key=lambda number: (-len(texts[number].tokens), number))
        batches = [order[at : at + batch_size] for at in range(0, len(order), batch_size)]
        batches = batches[world.rank :: world.size]
        sums, total = {}, sum(map(len, batches))
        for batch in batches:
            with explain_out_of_memory(batch_size):
                sums.update(zip(batch, _batch_sums(model, [texts[number] for number in batch]), strict=True))
            if progress:
                progress(self.task.name, len(sums), total)
        return sums


@torch.no_grad()
def _batch_sums(model: PreTrainedModel, texts: Sequence[_Text]) -> list[float]:
    if not any(text.count for text in texts):
        return [0.0] * len(texts)
    # padded on the right, where a causal model does not look
    tokens = torch.zeros(len(texts), max(len(text.tokens) for text in texts), dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, text in enumerate(texts):
        tokens[row, : len(text.tokens)] = torch.tensor(text.tokens)
        mask[row, : len(text.tokens)] = 1
    tokens, mask = tokens.to(model.device), mask.to(model.device)
    logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    sums = []
    for row, text in enumerate(texts):
        if not text.count:
            sums.append(0.0)
            continue
        start, stop = text.start, len(text.tokens)
        scores, targets = logits[row, start - 1 : stop - 1].float(), tokens[row, start:stop].to(logits.device)
        sums.append(cross_entropy(scores, targets, reduction="none").double().sum().item())
    return sums


def _measurements(sums: Sequence[float], counts: Sequence[int]) -> dict[str, Measurement]:
    """Perplexity and loss over all tokens, with what each example contributes to them.

    The loss L = sum(s) / sum(t) is a ratio of two sums over n examples (s_i: losses, t_i: tokens). Its linearisation
    z_i = L + (s_i - L t_i) n / sum(t) has the mean L and the spread of L's usual error, and differences of z_i are the
    linearisation of a difference; exp(L) (1 + z_i - L) does the same for perplexity. So the intervals of means, of
    paired differences and of retained gains hold for both, with examples as the unit.
    """
    n, total = sum(count > 0 for count in counts), sum(counts)
    loss = math.fsum(sums) / total if total else math.nan
    # of a model that is broken, or not asked for a single token
    if not math.isfinite(loss) or loss > math.log(torch.finfo(torch.float64).max) / 2:
        unknown = Measurement(n=n, higher_is_better=False)
        return {"perplexity": unknown, "loss": unknown}
    parts = [(one - loss * count) * n / total if count else None for one, count in zip(sums, counts, strict=True)]
    scores = {
        "perplexity": [None if part is None else math.exp(loss) * (1 + part) for part in parts],
        "loss": [None if part is None else loss + part for part in parts],
    }
    return {name: Measurement(values, higher_is_better=False) for name, values in scores.items()}
