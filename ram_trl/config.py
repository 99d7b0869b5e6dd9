"""Options of the recipes as dataclasses, read from the command line and from YAML, without importing torch.

The form is TRL's: every field is an option with its help beside it, `--config FILE.yaml` gives defaults and the
command line wins. TRL's own parser is not used for the merge because importing TRL takes longer than a merge.
"""

import argparse
import dataclasses
import importlib
import os
import reprlib
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from .arithmetic.defaults import DEFAULT_EPSILON
from .errors import ConfigError


__all__ = ["MergeConfig", "OptionParser", "RegistryConfig", "load_function", "parse_config"]

T = TypeVar("T")

# Bytes of a file of options.
_LARGEST_CONFIG = 1_000_000
# The authors' released script computes lambda = 1 + 0.2 * min(rho, 1).
PRESETS = {"official": {"r": 0.2, "alpha": 1.0}}
_DEFAULTS = {"r": 0.1, "alpha": 2.0}


@dataclass(kw_only=True)
class MergeConfig:
    """Options of `recipes/merge.py`; the fields are described by their help."""

    registry: str = field(metadata={"help": "Directory of the registry."})
    output_dir: str | None = field(
        default=None,
        metadata={"help": "Directory for the merged model; must not exist or be empty. Or --merge_to, --probe_only."},
    )
    merge_to: str | None = field(
        default=None, metadata={"help": "Make the merged model the next version of this generalist of the registry."}
    )
    gate: str | None = field(
        default=None,
        metadata={"help": "With --merge_to: MODULE:FUNCTION that promotes or refuses the merged model (docs)."},
    )
    agents: list[str] | None = field(
        default=None,
        metadata={"help": "Agents to merge, NAME or NAME@v2. Default: the latest version of every agent."},
    )
    base_model: str | None = field(
        default=None, metadata={"help": "Where the base model is now, if it is not where it was at registration."}
    )
    method: str = field(
        default="ram_plus", metadata={"help": "ram_plus, ram, ram_plus_soft, or average (plain mean, for comparison)."}
    )
    preset: str | None = field(
        default=None, metadata={"help": "official: r and alpha as in the authors' release (r=0.2, alpha=1.0)."}
    )
    r: float | None = field(default=None, metadata={"help": "Rescale strength r (equation 6). Default: 0.1."})
    alpha: float | None = field(default=None, metadata={"help": "Bound alpha on rho (equation 6). Default: 2.0."})
    epsilon: float = field(
        default=DEFAULT_EPSILON,
        metadata={"help": "A parameter counts as changed when it differs from the base by more than this."},
    )
    weights: dict[str, float] | None = field(
        default=None, metadata={"help": "Weights of agents, like math=1.0 code=0.5. Default: 1 for each."}
    )
    output_dtype: str = field(default="auto", metadata={"help": "auto (the base's), float32, bfloat16 or float16."})
    rounding: str = field(
        default="nearest", metadata={"help": "nearest, or stochastic (keeps small rescaled updates)."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of stochastic rounding."})
    engine: str = field(
        default="auto",
        metadata={"help": "auto, compiled (loops for the CPU) or eager (torch, on a GPU if there is one)."},
    )
    max_shard_size: str = field(default="5GB", metadata={"help": "Largest size of a weight file."})
    probe_only: bool = field(default=False, metadata={"help": "Count overlaps and print the report; write nothing."})
    cpu: bool = field(default=False, metadata={"help": "With --engine eager: on the CPU even if there is a GPU."})

    def __post_init__(self):
        if self.preset is not None and self.preset not in PRESETS:
            raise ConfigError(f"preset={self.preset!r} is not one of {', '.join(PRESETS)}")
        if [self.output_dir is not None, self.merge_to is not None, self.probe_only].count(True) == 0:
            raise ConfigError("no --output_dir was given (or --merge_to, or --probe_only to look without merging)")
        if self.merge_to is not None and (self.output_dir is not None or self.probe_only):
            raise ConfigError("--merge_to writes into the registry: leave out --output_dir and --probe_only")
        if self.gate is not None and self.merge_to is None:
            raise ConfigError("--gate judges a generalist: name one with --merge_to")
        for name, value in {**_DEFAULTS, **PRESETS.get(self.preset, {})}.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def merge_arguments(self) -> dict[str, Any]:
        """Keyword arguments of [`merge_agents`], or of [`integrate_agents`] if there is a generalist to merge to."""
        arguments = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for option in ("preset", "probe_only", "cpu", "merge_to", "gate"):
            del arguments[option]
        arguments["weights"] = arguments["weights"] or {}
        if self.probe_only:
            arguments["output_dir"] = None
        if self.merge_to is not None:
            del arguments["output_dir"]
            arguments["generalist"] = self.merge_to
            arguments["gate"] = None if self.gate is None else load_function(self.gate, "gate")
        return arguments


@dataclass(kw_only=True)
class RegistryConfig:
    """Options of `recipes/train_grpo.py` beside TRL's own; the fields are described by their help."""

    registry: str = field(metadata={"help": "Directory of the registry."})
    agent: str = field(metadata={"help": "Name to register the agent under."})
    reward_funcs: list[str] = field(metadata={"help": "Reward functions with TRL's signature, each MODULE:FUNCTION."})
    registry_base_model: str | None = field(
        default=None, metadata={"help": "Base model of the agent. Default: the model that training starts from."}
    )
    snapshot_dtype: str = field(
        default="auto", metadata={"help": "auto (what rollouts execute), bfloat16, float16 or float32."}
    )
    snapshot_epsilon: float = field(
        default=DEFAULT_EPSILON, metadata={"help": "Smallest change that is stored of weights kept in float32."}
    )
    merge_to: str | None = field(
        default=None,
        metadata={"help": "After registering, merge the agents into the next version of this generalist."},
    )
    merge_config: str | None = field(
        default=None, metadata={"help": "YAML file with options of recipes/merge.py for --merge_to (agents, gate, r)."}
    )
    strict: bool = field(default=False, metadata={"help": "Fail at the end if the agent cannot be registered."})


class OptionParser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all others, and that takes no --agent for --agents."""

    def __init__(self, **arguments: Any):
        super().__init__(**arguments, allow_abbrev=False)

    def error(self, message: str):
        raise ConfigError(f"{message} (see {self.prog} --help)")


def parse_config(config_class: type[T], argv: list[str] | None = None, description: str | None = None) -> T:
    """Read a dataclass of options from the command line and the YAML file that `--config` names.

    Args:
        config_class (`type`):
            Dataclass whose fields are of type `str`, `int`, `float`, `bool`, `list[str]` or `dict[str, float]`, each
            optional or not, with `help` in their metadata.
        argv (`list[str]`, *optional*):
            Arguments; the program's own by default.
        description (`str`, *optional*):
            What the program does, for `--help`.

    Raises:
        ConfigError: if the file or the command line has an unknown option or a value of the wrong type.
    """
    parser = OptionParser(description=description)
    parser.add_argument("--config", help="YAML file with any of these options; the command line wins.")
    options = {option.name: option for option in dataclasses.fields(config_class)}
    kinds = {name: _kind(hint) for name, hint in typing.get_type_hints(config_class).items()}
    for name, option in options.items():
        arguments: dict[str, Any] = {"help": option.metadata["help"], "default": argparse.SUPPRESS}
        if kinds[name] is bool:
            arguments["action"] = argparse.BooleanOptionalAction
        elif kinds[name] in (list, dict):
            arguments["nargs"] = "+"
            arguments["metavar"] = "NAME=WEIGHT" if kinds[name] is dict else "NAME"
        else:
            arguments["type"] = kinds[name]
        parser.add_argument(f"--{name}", **arguments)
    given = vars(parser.parse_args(argv))
    path = given.pop("config")
    values = {**(_read_yaml(path) if path else {}), **given}
    for name in values:
        if name not in options:
            raise ConfigError(f"{path} has an unknown option {name!r}; known are: {', '.join(options)}")
    for name, option in options.items():
        if name not in values and option.default is dataclasses.MISSING:
            raise ConfigError(f"no --{name} was given")
    return config_class(**{name: _convert(name, value, kinds[name]) for name, value in values.items()})


def load_function(name: str, option: str) -> Callable[..., Any]:
    """Import a function that an option names as `MODULE:FUNCTION`, from the working directory too.

    Raises:
        ConfigError: naming the option, if there is no such function.
    """
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:
        # a user's module can raise anything when it is imported
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{option}: {name!r} is not a MODULE:FUNCTION that can be imported: {problem}") from error
    if not callable(found):
        raise ConfigError(f"{option}: {name!r} is not a function")
    return found


def _kind(hint: Any) -> type:
    """The plain type of an annotation: `list` of `list[str] | None`."""
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    return typing.get_origin(hint) or hint


def _convert(name: str, value: Any, kind: type) -> Any:
    """A value of the command line or of YAML, which reads 1e-5 as a string, as the type of its field."""
    try:
        if kind is dict:
            pairs = value.items() if isinstance(value, dict) else [_text(item).rsplit("=", 1) for item in value]
            return {str(key): _number(weight) for key, weight in pairs}
        if kind is list:
            if not isinstance(value, list):
                raise ValueError
            return [_text(item) for item in value]
        if kind is bool:
            if not isinstance(value, bool):
                raise ValueError
            return value
        if kind is int and isinstance(value, float):
            raise ValueError
        return kind(_text(value))
    except (TypeError, ValueError) as error:
        expected = "NAME=WEIGHT ..." if kind is dict else kind.__name__
        raise ConfigError(f"{name}={reprlib.repr(value)} is not of the form {expected}") from error


def _text(value: Any) -> str:
    """A scalar as text: not a list, not true or false."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise TypeError
    return str(value)


def _number(value: Any) -> float:
    return float(_text(value))


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        if Path(path).stat().st_size > _LARGEST_CONFIG or not (Path(path).is_file() or Path(path).is_dir()):
            raise ConfigError(f"{path} is not a file of options")
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ConfigError:
        raise
    # what YAML's constructors raise on values that look like numbers or dates
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold options (name: value)")
    # an option that is set to nothing is not set
    return {name: value for name, value in content.items() if value is not None}
