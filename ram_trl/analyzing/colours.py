"""Colours that the pictures and the page have in common."""

from typing import Any


__all__ = ["PALETTE", "agent_colours"]

# Okabe and Ito's palette for all kinds of colour vision, without black and the yellow that white paper swallows.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#999999")


def agent_colours(data: dict[str, Any]) -> dict[str, str]:
    """A colour for every agent, the same in all pictures."""
    return {agent["label"]: PALETTE[at % len(PALETTE)] for at, agent in enumerate(data["agents"])}
