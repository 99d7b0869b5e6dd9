"""How the pictures of this package look, as settings of matplotlib."""

__all__ = ["INK", "PAPER", "PICTURE_STYLE"]

# Of text and lines, and of what is behind them. The page of an analysis puts its own colours in their place.
INK, PAPER = "#1f2328", "#fefefe"

PICTURE_STYLE = {
    # names are no formulas
    "text.parse_math": False,
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.linewidth": 0.7,
    "legend.frameon": False,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}
