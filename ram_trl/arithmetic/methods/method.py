"""What a merge method is: a row of the table in `__init__.py`, and pure functions on tensors."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError
from ..ram import TileUpdate


__all__ = ["Method", "Option", "TileContext", "fill_options", "sum_method"]


@dataclass(frozen=True, slots=True)
class Option:
    """A number that a user may set with `--method_options`.

    Args:
        default (`float`):
            The value if it is not set; docs/METHODS.md says whose.
        low (`float`):
            Smallest value that makes sense.
        high (`float`):
            Largest value that makes sense.
        whole (`bool`, *optional*, defaults to `False`):
            Whether it must be an integer.
        at_most (`str`, *optional*):
            Another option of the method, which it must not exceed.
    """

    default: float
    low: float
    high: float
    whole: bool = False
    at_most: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TileContext:
    """What a method may know beside the tile. Lists are by the position of the agent in the merge.

    Args:
        name (`str`):
            Name of the tensor.
        start (`int`):
            Index of the tile's first element in the flattened tensor.
        agents (`Sequence[str]`):
            Names and versions, `"math@v1"`.
        weights (`Sequence[float]`):
            Weight w of every agent, positive.
        factors (`Sequence[float]`):
            Rescale factor lambda of every agent; of RAM's methods.
        options (`Mapping[str, float]`):
            Every option of the method.
        thresholds (`Sequence[float]`):
            Smallest magnitude that is kept of every agent; of methods that trim.
        fishers (`Sequence[Tensor]`):
            Diagonal Fisher information of every agent (float32, flat, this tile); of methods that need it.
        seed (`int`):
            Seed of the merge.
    """

    name: str
    start: int
    agents: Sequence[str]
    weights: Sequence[float]
    factors: Sequence[float]
    options: Mapping[str, float]
    thresholds: Sequence[float]
    fishers: Sequence[Tensor]
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A way to merge agents.

    Args:
        name (`str`):
            What `--method` takes.
        title (`str`):
            Its name in running text.
        summary (`str`):
            One sentence that says what it does.
        paper (`str`):
            arXiv id.
        merge_tile (`Callable[[Tensor, Sequence[TileUpdate], TileContext], Tensor]`):
            Base (float32, flat) and the agents that touch the tile, their masks set, to merged parameters (float32,
            flat). It must not change its arguments, and its result for an element must not depend on the others: tiles
            are cut anywhere.
        options (`Mapping[str, Option]`, *optional*):
            Its options.
        is_masked (`bool`, *optional*, defaults to `False`):
            Whether only changes of more than epsilon count (equation 1). All others are zeroed for it.
        rescale (`Callable[..., float]`, *optional*):
            RAM's methods alone: lambda from rho, r and alpha. The compiled loops do their work.
        coefficients (`Callable[[TileContext], Sequence[float]]`, *optional*):
            Of a method that adds up the deltas ([`sum_method`]): each agent's factor. The compiled loops do its work.
        trimmed_from (`Callable[[TileUpdate, TileContext], Tensor]`, *optional*):
            For methods that keep the largest changes of each agent: the vector (float32, flat, a tile of it) of which
            the share `density` is kept, of the whole model, or of each tensor if `per_tensor` is 1.
        merge_matrix (`Callable[[Iterable[tuple[int, Tensor]], TileContext], Tensor]`, *optional*):
            For methods that see linear layers whole: the deltas of the agents that touch one (position; float32, 2-D),
            read one after another as they are asked for, to the merged delta. Everything else is left to `merge_tile`.
        needs_fisher (`bool`, *optional*, defaults to `False`):
            Whether it needs the agents' Fisher information (`recipes/fisher.py`).
    """

    name: str
    title: str
    summary: str
    paper: str
    merge_tile: Callable[[Tensor, Sequence[TileUpdate], TileContext], Tensor]
    options: Mapping[str, Option] = field(default_factory=dict)
    is_masked: bool = False
    rescale: Callable[..., float] | None = None
    coefficients: Callable[[TileContext], Sequence[float]] | None = None
    trimmed_from: Callable[[TileUpdate, TileContext], Tensor] | None = None
    merge_matrix: Callable[[Iterable[tuple[int, Tensor]], TileContext], Tensor] | None = None
    needs_fisher: bool = False

    @property
    def is_compiled(self) -> bool:
        """Whether the compiled loops do its work, where the installation has them."""
        return self.rescale is not None or self.coefficients is not None


def fill_options(method: Method, given: Mapping[str, float]) -> dict[str, float]:
    """A method's options as they were given, and its defaults for the others.

    Raises:
        ConfigError: if an option is not the method's, or out of its range.
    """
    if unknown := sorted(set(given) - set(method.options)):
        known = ", ".join(f"{name}={option.default:g}" for name, option in method.options.items())
        cure = f"it has {known}" if known else "it has none"
        if method.rescale is not None:
            cure += "; r and alpha are options of their own (--r, --alpha)"
        raise ConfigError(f"method_options: {unknown[0]!r} is no option of method={method.name}: {cure}")
    values = {name: float(given.get(name, option.default)) for name, option in method.options.items()}
    for name, option in method.options.items():
        if not option.low <= values[name] <= option.high or (option.whole and values[name] != int(values[name])):
            kind = "an integer" if option.whole else "a number"
            raise ConfigError(
                f"method_options: {name}={values[name]:g} must be {kind} from {option.low:g} to {option.high:g}"
            )
        if option.at_most and values[name] > values[option.at_most]:
            raise ConfigError(
                f"method_options: {name}={values[name]:g} must be at most {option.at_most}={values[option.at_most]:g}"
            )
    return values


def sum_method(coefficients: Callable[[TileContext], Sequence[float]], **row: Any) -> Method:
    """A method that adds up the deltas: base + sum_t k_t delta_t.

    Args:
        coefficients (`Callable[[TileContext], Sequence[float]]`):
            The factor k of every agent of the merge; the same for all tiles.
        **row:
            Arguments of [`Method`].
    """

    def merge_tile(base: Tensor, updates: Sequence[TileUpdate], context: TileContext) -> Tensor:
        factors, merged = coefficients(context), torch.zeros_like(base)
        for update in updates:
            merged.add_(update.delta, alpha=factors[update.agent])
        return merged.add_(base)

    return Method(merge_tile=merge_tile, coefficients=coefficients, **row)
