"""What the command line and the recipes show: progress, one clear line for an error, exit code 2."""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator

from .errors import RamTrlError
from .table import printable


__all__ = ["NOT_EVALUATED", "exit_on_error", "progress_bar"]

# Exit code of a recipe that has evaluated or merged something, but could not evaluate all.
NOT_EVALUATED = 3


@contextlib.contextmanager
def exit_on_error(*more: type[Exception]) -> Iterator[None]:
    """Print an error of this package as one line on stderr and exit with code 2.

    Of several processes rank 0 speaks. A termination by signal unwinds like an interruption from the keyboard, so that
    nothing half-written stays behind.

    Args:
        *more (`type[Exception]`):
            Other errors to treat so.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    except (RamTrlError, *more) as error:
        if not _is_another_rank():
            text = f"{error}" if isinstance(error, RamTrlError) else f"{type(error).__name__}: {error}"
            # one line, whatever names are in it
            print(f"error: {printable(text)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


@contextlib.contextmanager
def progress_bar(unit: str = "B") -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each stage of a long work, counted in bytes or in something else, on stderr."""
    from tqdm import tqdm

    bars: dict[str, tqdm] = {}

    def show(doing: str, done: int, total: int) -> None:
        if doing not in bars:
            close()
            bars[doing] = tqdm(desc=doing, total=total, unit=unit, unit_scale=unit == "B", leave=True)
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


def _is_another_rank() -> bool:
    """Whether a launcher started this process beside one that is rank 0."""
    rank = os.environ.get("RANK", "")
    return rank.isdecimal() and int(rank) > 0 and "MASTER_ADDR" in os.environ
