"""How long work tells how far it is."""

from collections.abc import Callable


__all__ = ["Progress"]

# Called with what is being done, how many bytes of it are done, and how many there are.
Progress = Callable[[str, int, int], None]
