"""Records that are written down as JSON, and whose fields have the types that they say when they are read back."""

import functools
import math
import re
import typing
from collections.abc import Callable
from types import UnionType
from typing import Any


__all__ = ["Record"]


# half of a pair, which could not be written again
_SURROGATE = re.compile("[\ud800-\udfff]")
_INT_END = 1 << 63
# where nothing is said of a number: a float can still hold it, and it can be printed
_ANY_INT_END = 1 << 1000


class Record:
    """Base of dataclasses that are written down.

    Raises:
        TypeError: if a field has a value of another type. Integers are natural numbers below 2^63, all numbers are
            finite, and all text can be written.
    """

    __slots__ = ()

    def __post_init__(self):
        for name, is_fit in _fields(type(self)):
            if not is_fit(getattr(self, name)):
                raise TypeError(f"{name} cannot be {getattr(self, name)!a:.60}")


@functools.cache
def _fields(record: type[Record]) -> list[tuple[str, Callable[[Any], bool]]]:
    """The fields of a record, and what tells whether a value is of its type."""
    return [(name, _check_of(kind)) for name, kind in typing.get_type_hints(record).items()]


def _check_of(kind: Any) -> Callable[[Any], bool]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return _has_sane_numbers
    if origin is UnionType:
        checks = [_check_of(choice) for choice in arguments]
        return lambda value: any(check(value) for check in checks)
    if origin is list:
        check = _check_of(arguments[0])
        return lambda value: type(value) is list and all(map(check, value))
    if origin is dict:
        check = _check_of(arguments[1])
        return lambda value: type(value) is dict and all(map(check, value.values()))
    if kind is int:
        return lambda value: _is_int(value) and 0 <= value < _INT_END
    if kind is float:
        # a whole number may have been written without a point
        return lambda value: (
            math.isfinite(value) if isinstance(value, float) else _is_int(value) and abs(value) < _INT_END
        )
    if kind is str:
        return lambda value: type(value) is str and (value.isascii() or not _SURROGATE.search(value))
    return lambda value: type(value) is kind


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and type(value) is not bool


def _has_sane_numbers(value: Any) -> bool:
    """Whether every number in a value that was read from JSON is finite, and not too large to be dealt with."""
    rest = [value]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            rest.extend(value.values())
        elif isinstance(value, list):
            rest.extend(value)
        elif isinstance(value, float) and not math.isfinite(value):
            return False
        elif isinstance(value, int) and abs(value) >= _ANY_INT_END:
            return False
    return True
