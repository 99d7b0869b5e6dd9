"""Finding versions of agents by what is recorded of them. Manifests and labels are read, no weights."""

import logging
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from ..errors import ConfigError, RamTrlError
from ..storage.registry import AgentRegistry, RegisteredAgent


__all__ = ["Found", "Query", "search_agents"]

logger = logging.getLogger(__name__)

_COMPARISONS = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
}
_CONDITION = re.compile(r"\s*([^<>=!]+?)\s*(>=|<=|==|!=|>|<|=)\s*([^<>=!]+?)\s*")
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
# Fewer letters of a digest could be meant as a name.
_SHORTEST_DIGEST = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """What to search for; everything that is set has to be true of a version.

    Args:
        base (`str`, *optional*):
            Part of the base model's name, in any case, or the beginning of its digest or revision.
        kind (`str`, *optional*):
            `"full"` or `"lora"`.
        tags (`Sequence[str]`):
            Tags that it carries.
        alias (`str`, *optional*):
            Alias that means it.
        min_density (`float`, *optional*):
            Smallest share of the base's parameters that it changed. Of a LoRA agent that is not recorded.
        max_density (`float`, *optional*):
            Largest share.
        since (`str`, *optional*):
            Registered at this time or later: ISO 8601, in UTC unless it says otherwise; a date or a date and time.
        until (`str`, *optional*):
            Registered at this time, or on this day, or earlier.
        metrics (`Sequence[str]`):
            Conditions like `"reward>0.5"` on the last metrics of its training.
        text (`str`, *optional*):
            Part of any text that its manifest records, in any case.
        latest (`bool`):
            Only the latest version of every agent.

    Raises:
        ConfigError: if a value cannot be used.
    """

    base: str | None = None
    kind: str | None = None
    tags: Sequence[str] = ()
    alias: str | None = None
    min_density: float | None = None
    max_density: float | None = None
    since: str | None = None
    until: str | None = None
    metrics: Sequence[str] = ()
    text: str | None = None
    latest: bool = False

    def __post_init__(self):
        if self.kind not in (None, "full", "lora"):
            raise ConfigError(f"kind={self.kind!r} is not one of full, lora")
        for condition in self.metrics:
            _parse_condition(condition)
        for name in ("since", "until"):
            if getattr(self, name) is not None:
                _parse_time(getattr(self, name), name)

    @property
    def metric_names(self) -> list[str]:
        """The metrics that there are conditions on, each once."""
        return list(dict.fromkeys(_parse_condition(condition)[0] for condition in self.metrics))


@dataclass(frozen=True, slots=True)
class Found:
    """A version that was found.

    Args:
        agent ([`RegisteredAgent`]):
            The version.
        aliases (`list[str]`):
            Aliases that mean it.
        tags (`list[str]`):
            Its tags.
    """

    agent: RegisteredAgent
    aliases: list[str]
    tags: list[str]


def search_agents(registry: AgentRegistry | str, query: Query) -> list[Found]:
    """Versions of agents that a query is true of, by name and number.

    Args:
        registry ([`AgentRegistry`] or `str`):
            The registry.
        query ([`Query`]):
            What to search for.

    Returns:
        `list[Found]`: a version whose manifest is damaged is left out, and logged.
    """
    registry = AgentRegistry(registry)
    return [
        found for name in registry.names() for found in _versions(registry, name, query) if _is_meant(found, query)
    ]


def _versions(registry: AgentRegistry, name: str, query: Query) -> Iterator[Found]:
    labels, numbers = registry.labels(name), registry.versions(name)
    aliases, tags = labels.aliases(), labels.tags()
    for number in numbers[-1:] if query.latest else numbers:
        try:
            agent = registry.get(f"{name}@v{number}")
        except RamTrlError as error:
            logger.warning("left out: %s", error)
            continue
        yield Found(agent, [alias for alias, meant in aliases.items() if meant == number], tags.get(number, []))


def _is_meant(found: Found, query: Query) -> bool:
    manifest = found.agent.manifest
    density, created = manifest.density, _time(manifest.created)
    return (
        (query.base is None or _is_base(manifest.base_model, query.base))
        and query.kind in (None, manifest.kind)
        and set(query.tags) <= set(found.tags)
        and (query.alias is None or query.alias in found.aliases)
        and (query.min_density is None or (density is not None and density >= query.min_density))
        and (query.max_density is None or (density is not None and density <= query.max_density))
        and (query.since is None or (created is not None and created >= _parse_time(query.since, "since")))
        and (query.until is None or (created is not None and created <= _parse_time(query.until, "until")))
        and all(_holds(condition, manifest.training) for condition in query.metrics)
        and (query.text is None or any(query.text.lower() in text.lower() for text in _texts(manifest.to_dict())))
    )


def _is_base(base: Any, wanted: str) -> bool:
    codes = (base.digest, base.revision or "") if len(wanted) >= _SHORTEST_DIGEST else ()
    return wanted.lower() in base.name.lower() or any(code.startswith(wanted) for code in codes)


def _parse_condition(condition: str) -> tuple[str, Any, float]:
    match = _CONDITION.fullmatch(condition)
    try:
        return match[1], _COMPARISONS[match[2]], float(match[3])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"metric={condition!r} is not a condition like 'reward>0.5' (in quotes)") from error


def _holds(condition: str, training: dict[str, Any]) -> bool:
    name, compare, number = _parse_condition(condition)
    metrics = training.get("metrics")
    value = metrics.get(name) if isinstance(metrics, dict) else None
    return isinstance(value, int | float) and compare(value, number)


def _parse_time(text: str, option: str) -> datetime:
    time = _time(text)
    if time is None:
        raise ConfigError(f"{option}={text!r} is not a date like 2026-11-22 or 2026-11-22T14:30")
    # until a day is until its end
    is_day = option == "until" and _DAY.fullmatch(text) is not None
    return time + timedelta(days=1, microseconds=-1) if is_day else time


def _time(text: str) -> datetime | None:
    try:
        # Python 3.10 reads no Z
        time = datetime.fromisoformat(f"{text[:-1]}+00:00" if text.endswith("Z") else text)
        return (time if time.tzinfo else time.replace(tzinfo=timezone.utc)).astimezone(timezone.utc)
    except (TypeError, ValueError, AttributeError, OverflowError):
        return None


def _texts(value: Any) -> Iterator[str]:
    """Every value in data of JSON that is a text."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
