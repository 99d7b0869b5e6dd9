"""Tables of plain text and of Markdown."""

import re
from collections.abc import Sequence


__all__ = ["align", "escape_markdown", "markdown_table", "printable"]


def printable(text: str) -> str:
    """A text for one line of a terminal: names may hold anything, also what breaks lines."""
    return "".join(c if c.isprintable() else "?" for c in text)


def align(rows: Sequence[Sequence[str]], num_left: int) -> list[str]:
    """A line for each row, cells one below another: the first `num_left` columns to the left, others to the right."""
    rows = [list(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def escape_markdown(text: str) -> str:
    """Text that Markdown shows as it is, also in a cell of a table."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", " ".join(text.split()))


def markdown_table(rows: Sequence[Sequence[str]], num_left: int) -> list[str]:
    """Lines of a table in Markdown, the first row its head: the first `num_left` columns to the left.

    Cells are Markdown; text goes through [`escape_markdown`] before.
    """
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|" + "|".join(["---"] * num_left + ["---:"] * (len(rows[0]) - num_left)) + "|")
    return lines
