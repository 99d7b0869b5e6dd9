"""Reading options from the command line and from YAML into dataclasses, without importing torch.

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
from pathlib import Path
from typing import Any, TypeVar

from .errors import ConfigError


__all__ = ["OptionParser", "load_function", "parse_config", "read_yaml"]

T = TypeVar("T")

# Bytes of a file of options.
_LARGEST_CONFIG = 1_000_000


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
    values = {**(_read_options(path) if path else {}), **given}
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


def read_yaml(path: str) -> Any:
    """The content of a YAML file that a user wrote.

    Raises:
        ConfigError: if there is no such file, or no YAML in it.
    """
    # most merges are told by options alone, and start without it
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key that is there twice, of which YAML's own takes the last."""

        def construct_mapping(self, node, deep=False):
            seen = set()
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                if (key.tag, key.value) in seen and isinstance(key, yaml.ScalarNode):
                    raise yaml.YAMLError(f"{key.value!r} is there twice")
                seen.add((key.tag, str(key.value)))
            return super().construct_mapping(node, deep)

    try:
        if Path(path).stat().st_size > _LARGEST_CONFIG or not (Path(path).is_file() or Path(path).is_dir()):
            raise ConfigError(f"{path} is not a file of options")
        return yaml.load(Path(path).read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ConfigError:
        raise
    # what YAML's constructors raise on values that look like numbers or dates
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error


def _read_options(path: str) -> dict[str, Any]:
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold options (name: value)")
    # an option that is set to nothing is not set
    return {name: value for name, value in content.items() if value is not None}
