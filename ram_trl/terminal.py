"""What the command line and the recipes show: progress, one clear line for an error, exit code 2."""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

from .errors import RamTrlError


__all__ = ["exit_on_error", "progress_bar"]


@contextlib.contextmanager
def exit_on_error(is_main: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Print an error of this package as one line on stderr and exit with code 2.

    Args:
        is_main (`Callable[[], bool]`, *optional*):
            Whether this process is the one that speaks.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        yield
    except RamTrlError as error:
        if is_main():
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each stage of a long work, on stderr."""
    from tqdm import tqdm

    bars: dict[str, tqdm] = {}

    def show(doing: str, done: int, total: int) -> None:
        if doing not in bars:
            close()
            bars[doing] = tqdm(desc=doing, total=total, unit="B", unit_scale=True, leave=True)
        bars[doing].update(done - bars[doing].n)
        if done >= total:
            # what is printed next begins on a line of its own
            bars[doing].close()

    def close() -> None:
        for bar in bars.values():
            bar.close()

    try:
        yield show
    finally:
        close()
