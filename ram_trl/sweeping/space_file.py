"""Reading the YAML file that says what a sweep tries, and refusing what no merge could use.

```yaml
r: [0.0, 0.1, 0.2]                     # a list of values; a grid has nothing else
agents: [[math, code], [math, code, tool]]
alpha: {low: 0.5, high: 4.0}           # a range, for a search; step: 0.5 or log: true
weights.tool: {low: 0.25, high: 2.0}   # of one agent; tried only where it is merged
method: [ram_plus, ties]
method_options.density: [0.1, 0.2]     # tried only with the methods that have it
```
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from ..arithmetic.methods import METHODS
from ..errors import ConfigError
from ..merging.plan import MergeSettings
from ..options import read_yaml
from .space import DEFAULT_METHOD, GROUPS, Choices, Range, Space, ends, short


__all__ = ["read_space"]

# What does not change a merge.
_NOT_SWEPT = ("engine",)
_KNOWN = ["agents", *(f.name for f in dataclasses.fields(MergeSettings) if f.name not in _NOT_SWEPT)]
_NUMBERS = ("r", "alpha", "epsilon")
_RANGE = ("low", "high", "log", "step")


def read_space(path: str) -> Space:
    """Read a YAML file of what a sweep tries.

    Args:
        path (`str`):
            File with options of [`apply_merge`], each a list of values or a range.

    Raises:
        ConfigError: naming what no merge could use.
    """
    content = read_yaml(path)
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"{path} holds no options (name: list of values)")
    for name in content:
        group, _, part = str(name).partition(".")
        if name not in _KNOWN and not (group in GROUPS and part):
            raise ConfigError(
                f"{path}: unknown option {name!r}; known are: {', '.join(_KNOWN)}, weights.NAME, method_options.NAME"
            )
        if part and group in content:
            raise ConfigError(f"{path}: {name} is a part of {group}: name one of them")
    methods = _listed(path, "method", content.get("method", [DEFAULT_METHOD]))
    for method in methods:
        MergeSettings(method=method)
    space = Space(path=path, options={name: _option(path, name, spec, methods) for name, spec in content.items()})
    for name, option in space.options.items():
        points = [{"method": method} for method in methods] if "method" in content else [{}]
        parts = {key for options in option.values.values() for key in options} if name == "method_options" else ()
        for part in (name, *(f"{name}.{part}" for part in sorted(parts))):
            if not any(space.applies(part, point) for point in points):
                raise ConfigError(f"{path}: {part} is no option of method={', '.join(methods)}")
        for point, value in itertools.product(points, ends(option)):
            if not space.applies(name, point):
                continue
            settings = space.settings({**point, name: value})
            MergeSettings(**{key: setting for key, setting in settings.items() if key != "agents"})
    return space


def _option(path: str, name: str, spec: Any, methods: Sequence[str]) -> Choices | Range:
    is_number = name in _NUMBERS or "." in name
    if isinstance(spec, dict) and is_number:
        return _range(path, name, spec, methods)
    values = {}
    for value in _listed(path, name, spec):
        if is_number:
            value = _number(path, name, value)
        elif name in GROUPS:
            if not isinstance(value, dict):
                raise ConfigError(f"{path}: {name}={value!r} is not of the form {{NAME: NUMBER}}")
            value = {str(part): _number(path, name, number) for part, number in value.items()}
        elif name == "agents" and not (
            isinstance(value, list) and value and all(isinstance(agent, str) for agent in value)
        ):
            raise ConfigError(f"{path}: agents={value!r} is not a list of names: write [[math, code], [math, tool]]")
        if short(value) in values:
            raise ConfigError(f"{path}: {name} has {short(value)} twice")
        values[short(value)] = value
    return Choices(values)


def _listed(path: str, name: str, spec: Any) -> list[Any]:
    if not isinstance(spec, list) or not spec:
        cure = f"; of one of them: {name}.NAME: [0.5, 1.0]" if name in GROUPS else ""
        raise ConfigError(f"{path}: {name}={spec!r} is not a list of values{cure}")
    return spec


def _range(path: str, name: str, spec: dict[str, Any], methods: Sequence[str]) -> Range:
    if unknown := [key for key in spec if key not in _RANGE]:
        raise ConfigError(f"{path}: {name} has {unknown[0]!r}; a range has {', '.join(_RANGE)}")
    log = spec.get("log", False)
    if "low" not in spec or "high" not in spec or not isinstance(log, bool):
        raise ConfigError(f"{path}: {name}={spec!r} is not of the form {{low: 0.1, high: 1.0}}, or with log: true")
    low, high = (_number(path, name, spec[key]) for key in ("low", "high"))
    step = _number(path, name, spec["step"]) if "step" in spec else None
    group, _, part = name.partition(".")
    is_whole = group == "method_options" and any(
        METHODS[method].options[part].whole for method in methods if part in METHODS[method].options
    )
    for problem, is_there in (
        ("low must be below high", low >= high),
        ("log: true needs a low above 0", log and low <= 0),
        ("step and log: true exclude each other", log and step is not None),
        ("step must be above 0", step is not None and step <= 0),
        # which would have more digits than are kept
        ("step is too small for the range", step is not None and 0 < step < 1e-13 * (high - low)),
        ("it takes whole numbers", is_whole and not all(number.is_integer() for number in (low, high, step or 1.0))),
    ):
        if is_there:
            raise ConfigError(f"{path}: {name}={spec!r}: {problem}")
    option = Range(low, high, log, 1.0 if is_whole and not log and step is None else step, is_whole)
    # the last value that there is
    return option if option.step is None else dataclasses.replace(option, high=option.at(option.size - 1))


def _number(path: str, name: str, value: Any) -> float:
    # YAML reads 1e-5 as a string
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{path}: {name}={value!r} is not a number")
    return number
