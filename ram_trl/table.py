"""Tables of plain text."""

from collections.abc import Sequence


__all__ = ["align"]


def align(rows: Sequence[Sequence[str]], num_left: int) -> list[str]:
    """A line for each row, cells one below another: the first `num_left` columns to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
