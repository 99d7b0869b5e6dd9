"""Colours that the pictures and the page have in common."""

from typing import Any


__all__ = ["INK", "PALETTE", "PAPER", "agent_colours"]

# Okabe and Ito's palette for all kinds of colour vision, without black and the yellow that white paper swallows.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#999999")
# Of text and lines, and of what is behind them. The page puts its own colours in their place.
INK, PAPER = "#1f2328", "#fefefe"


def agent_colours(data: dict[str, Any]) -> dict[str, str]:
    """A colour for every agent, the same in all pictures."""
    return {agent["label"]: PALETTE[at % len(PALETTE)] for at, agent in enumerate(data["agents"])}
