"""How long work tells how far it is."""

from collections.abc import Callable


__all__ = ["Progress", "meter"]

# Called with what is being done, how many bytes of it are done, and how many there are.
Progress = Callable[[str, int, int], None]


def meter(doing: str, total: int, progress: Progress | None) -> Callable[[int], None]:
    """A function that adds up bytes that are done, and reports them."""
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress:
            progress(doing, done, total)

    return advance
