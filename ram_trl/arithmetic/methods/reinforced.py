"""RAM, RAM+ and RAM+s ([2601.13572](https://huggingface.co/papers/2601.13572)): one merge, three rules for lambda.

The arithmetic is in `ram.py`, and once more in the compiled loops.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from ..ram import TileUpdate, rescale_factor, selective_merge_tile
from .method import Method, TileContext


__all__ = ["RAM", "RAM_PLUS", "RAM_PLUS_SOFT"]

_SUMMARY = "Parameters that several agents changed are averaged, parameters that one agent changed are kept"


def _merge_tile(base: Tensor, updates: Sequence[TileUpdate], context: TileContext) -> Tensor:
    return selective_merge_tile(base, updates, context.factors, context.weights)


def _member(name: str, title: str, summary: str) -> Method:
    return Method(
        name=name,
        title=title,
        summary=summary,
        paper="2601.13572",
        merge_tile=_merge_tile,
        is_masked=True,
        rescale=partial(rescale_factor, name),
    )


RAM = _member("ram", "RAM", f"{_SUMMARY}.")
RAM_PLUS = _member("ram_plus", "RAM+", f"{_SUMMARY}, rescaled by how much of the agent was shared.")
RAM_PLUS_SOFT = _member(
    "ram_plus_soft",
    "RAM+s (soft saturation)",
    f"{_SUMMARY}, rescaled by how much of the agent was shared, softly bounded.",
)
