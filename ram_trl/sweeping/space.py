"""The merges that a sweep tries: what each option may be, and what it says beside the others."""

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..arithmetic.methods import METHODS
from ..errors import ConfigError
from ..merging.plan import MergeSettings
from ..storage.registry import AgentRegistry


__all__ = ["DEFAULT_METHOD", "GROUPS", "Choices", "Range", "Space", "ends", "short"]

_DEFAULTS = MergeSettings()
DEFAULT_METHOD = _DEFAULTS.method
# Options with parts of their own: weights.NAME, method_options.NAME.
GROUPS = ("weights", "method_options")
# Merges that nobody means to evaluate.
_MOST = 10_000


@dataclass(frozen=True, slots=True)
class Choices:
    """A list of values.

    Args:
        values (`dict[str, Any]`):
            The values, by their names in tables and files.
    """

    values: dict[str, Any]

    @property
    def size(self) -> int:
        return len(self.values)

    def labels(self) -> list[str]:
        """All of them."""
        return list(self.values)

    def holds(self, value: Any) -> bool:
        return isinstance(value, str) and value in self.values


@dataclass(frozen=True, slots=True)
class Range:
    """All numbers from one to another.

    Args:
        low (`float`):
            Smallest value.
        high (`float`):
            Largest value.
        log (`bool`, *optional*, defaults to `False`):
            Whether orders of magnitude count alike.
        step (`float`, *optional*):
            Only `low`, `low + step`, ...
        is_whole (`bool`, *optional*, defaults to `False`):
            Whether they must be integers.
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None
    is_whole: bool = False

    def tidy(self, value: float) -> float:
        """A value of the range with few digits: what is left out makes no merge that anyone could tell apart."""
        digits = 6 if self.step is None else 12
        return min(max(float(f"{value:.{digits}g}"), self.low), self.high)

    @property
    def size(self) -> float:
        """How many there are."""
        if self.step is None:
            return math.inf
        # a last step that rounding has made too long counts
        return math.floor((self.high - self.low) / self.step * (1 + 1e-9)) + 1

    def at(self, position: int) -> float:
        """The value after so many steps."""
        return self.tidy(self.low + position * self.step)

    def labels(self) -> list[float]:
        """All of them, of a range with steps."""
        return [self.at(position) for position in range(self.size)]

    def holds(self, value: Any) -> bool:
        if not isinstance(value, int | float) or not self.low <= value <= self.high:
            return False
        return self.step is None or self.at(round((value - self.low) / self.step)) == value


@dataclass(frozen=True, kw_only=True)
class Space:
    """The merges among which the best is looked for.

    A point of it has, for every option that says something there, the name of a choice or a number of a range.

    Args:
        path (`str`):
            The file that describes it.
        options (`dict[str, Choices | Range]`):
            What each option may be.
        agents (`list[str]`, *optional*):
            All agents that are merged; where `agents` is not an option, by every merge.
    """

    path: str
    options: dict[str, Choices | Range]
    agents: list[str] | None = None

    @property
    def varying(self) -> list[str]:
        """The options that have several values."""
        return [name for name, option in self.options.items() if option.size != 1]

    @property
    def is_countable(self) -> bool:
        """Whether all of its points can be listed."""
        return math.prod(option.size for option in self.options.values()) <= _MOST

    def pinned(self, registry: AgentRegistry, agents: Sequence[str] | None) -> "Space":
        """The same with the versions that the agents have now, so that all merges are of the same ones.

        Args:
            registry ([`AgentRegistry`]):
                The registry.
            agents (`Sequence[str]`, *optional*):
                The agents that are merged where `agents` is not an option; by default the latest of every agent.

        Raises:
            RamTrlError: naming an agent that there is not, a weight of an agent that is merged nowhere, or `agents` if
                it is an option.
        """
        options = dict(self.options)
        if "agents" not in options:
            merged = [str(agent) for agent in (registry if agents is None else map(registry.get, agents))]
        elif agents is not None:
            raise ConfigError(f"{self.path} has agents, the subsets that are merged: leave out --agents")
        else:
            subsets = {
                label: [str(registry.get(spec)) for spec in subset]
                for label, subset in options["agents"].values.items()
            }
            options["agents"] = Choices(subsets)
            merged = list(dict.fromkeys(itertools.chain(*subsets.values())))
        known = {name for spec in merged for name in _names(spec)}
        for option, spec in options.items():
            group, _, name = option.partition(".")
            if group == "weights":
                named = [name] if name else [key for weights in spec.values.values() for key in weights]
                if unknown := sorted(set(named) - known):
                    raise ConfigError(
                        f"{self.path}: weights names {unknown[0]!r}, which is merged nowhere; merged are: "
                        f"{', '.join(sorted(known))}"
                    )
        return Space(path=self.path, options=options, agents=merged)

    def applies(self, option: str, point: Mapping[str, Any]) -> bool:
        """Whether an option says something at a point: the weight of an agent that is merged, an option of its method.

        Of the point `agents` and `method` are looked at, if they vary.
        """
        group, _, name = option.partition(".")
        agents = self._value(point, "agents", self.agents)
        if group == "weights" and name:
            return agents is None or any(name in _names(spec) for spec in agents)
        method = METHODS[self._value(point, "method", DEFAULT_METHOD)]
        if group == "method_options" and name:
            return name in method.options
        if option in ("r", "alpha"):
            # an agent alone shares nothing, and nothing is rescaled
            is_alone = agents is not None and len(agents) == 1
            return method.rescale is not None and _depends(method.rescale, option) and not is_alone
        return True

    def holds(self, point: Mapping[str, Any]) -> bool:
        """Whether this is one of its points."""
        if not all(name in self.options and self.options[name].holds(value) for name, value in point.items()):
            return False
        return set(point) == {name for name in self.options if self.applies(name, point)}

    def settings(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of [`apply_merge`] at a point."""
        settings: dict[str, Any] = {} if self.agents is None else {"agents": self.agents}
        for option in point:
            group, _, name = option.partition(".")
            value = self._value(point, option)
            if name:
                settings.setdefault(group, {})[name] = value
            elif group in GROUPS:
                settings[group] = {key: value[key] for key in value if self.applies(f"{group}.{key}", point)}
            else:
                settings[group] = value
        return settings

    def label(self, point: Mapping[str, Any]) -> str:
        """Name of a merge: what varies."""
        settings, cells = self.settings(point), []
        for option in self.varying:
            if option in point:
                value = settings[option] if option in GROUPS else point[option]
                cells.append(f"{option}={short(value)}")
        return " ".join(cells) or "merge"

    def key(self, point: Mapping[str, Any]) -> str:
        """What two points have in common that come to the same merge."""
        settings = self.settings(point)
        rescale = METHODS[settings.get("method", DEFAULT_METHOD)].rescale
        if rescale is not None:
            used = {name: settings.pop(name, getattr(_DEFAULTS, name)) for name in ("r", "alpha")}
            # where one of them is 0 nothing is rescaled, whatever the other is
            if rescale(math.inf, **used) != 1:
                settings.update(used)
        return json.dumps(settings, sort_keys=True)

    def points(self) -> list[dict[str, Any]]:
        """Every point; of those that come to the same merge the first.

        Raises:
            ConfigError: if they cannot be listed.
        """
        for name, option in self.options.items():
            if math.isinf(option.size):
                raise ConfigError(f"{self.path}: {name} is a range: list its values, give it a step, or --search it")
        if not self.is_countable:
            raise ConfigError(f"{self.path} describes more than {_MOST:,} merges")
        points: dict[str, dict[str, Any]] = {}
        for values in itertools.product(*(option.labels() for option in self.options.values())):
            chosen = dict(zip(self.options, values, strict=True))
            point = {option: value for option, value in chosen.items() if self.applies(option, chosen)}
            points.setdefault(self.key(point), point)
        return list(points.values())

    def corners(self) -> list[dict[str, Any]]:
        """Merges that, if they can be planned, all can: of every method and subset, with the smallest epsilon."""
        names = [name for name in ("agents", "method", "epsilon") if name in self.options]
        values = [ends(self.options[name]) for name in names]
        if "epsilon" in names:
            values[-1] = [min(values[-1], key=float)]
        return [self.settings(dict(zip(names, chosen, strict=True))) for chosen in itertools.product(*values)]

    def _value(self, point: Mapping[str, Any], option: str, default: Any = None) -> Any:
        if option not in point:
            return default
        spec = self.options[option]
        return spec.values[point[option]] if isinstance(spec, Choices) else point[option]


def _depends(rescale: Callable[..., float], option: str) -> bool:
    """Whether lambda depends on r, or on alpha."""
    known = {"r": 1.0, "alpha": 1.0}
    return rescale(2.0, **known) != rescale(2.0, **{**known, option: 1.5})


def ends(option: Choices | Range) -> list[Any]:
    """The values by which all of them can be judged."""
    return [option.low, option.high] if isinstance(option, Range) else option.labels()


def _names(spec: str) -> tuple[str, str]:
    """An agent with and without its version."""
    return spec, spec.partition("@")[0]


def short(value: Any) -> str:
    """A value in the name of a merge: short, and no two alike."""
    if isinstance(value, dict):
        return ",".join(f"{key}:{short(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        return "+".join(map(short, value))
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value)
