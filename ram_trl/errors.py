"""Floor 0: what can go wrong, one class a kind.

Every error of this package derives from [`RamTrlError`] and from the standard library's nearest error, so that both
`except RamTrlError` and `except ValueError` do what a reader expects. A message is one line: what is wrong, where, and
the cure.
"""

__all__ = [
    "AgentNotFoundError",
    "BaseModelError",
    "ConfigError",
    "CorruptedFileError",
    "DistributedError",
    "IncompatibleAgentError",
    "InvalidNameError",
    "NonFiniteError",
    "OutputExistsError",
    "RamTrlError",
    "StorageError",
    "UnsupportedModelError",
]


# Letters of a message, of which the end names the cure.
_LONGEST = 4000


class RamTrlError(Exception):
    """Base of every error that this package raises on purpose. Its message is one line, whatever names are in it."""

    def __init__(self, *arguments: object):
        super().__init__(*(_line(text) if isinstance(text, str) else text for text in arguments))


class ConfigError(RamTrlError, ValueError):
    """An option has a value that cannot be used."""


class InvalidNameError(RamTrlError, ValueError):
    """A name of an agent, a version or a file that is not allowed."""


class AgentNotFoundError(RamTrlError, LookupError):
    """No such registry, agent or version."""


class BaseModelError(RamTrlError, ValueError):
    """The base model cannot be found, cannot be read, or is not the one that was recorded."""


class IncompatibleAgentError(RamTrlError, ValueError):
    """An agent does not fit its base model or the agents that it is to be merged with."""


class UnsupportedModelError(RamTrlError, NotImplementedError):
    """A kind of model, adapter or backend that this package refuses rather than handles wrongly."""


class NonFiniteError(RamTrlError, ArithmeticError):
    """NaN or infinity in the weights of an agent or of the base model."""


class CorruptedFileError(RamTrlError, ValueError):
    """A file whose bytes are not those that were written."""


class StorageError(RamTrlError, OSError):
    """The file system refused: disk full, no permission, input/output error."""


class OutputExistsError(RamTrlError, FileExistsError):
    """The output directory exists and is not empty."""


class DistributedError(RamTrlError, RuntimeError):
    """The processes of a run do not agree, or another process failed."""


def _line(text: str) -> str:
    """A text of which line breaks and control characters can be seen: a file can be named anything, at any length."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
