"""Where in a model a parameter is, read from its name."""

from dataclasses import dataclass


__all__ = ["Place", "find_place"]

# Containers that say nothing about a module outside of the layers.
_WRAPPERS = ("base_model", "language_model", "model", "transformer")
# Modules that come before the layers.
_INPUTS = ("embed", "wte", "wpe")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter is.

    Args:
        stack (`str`):
            What holds the layers (`"model.layers"`); empty outside of them.
        layer (`int`, *optional*):
            Number of the layer; `None` outside of them.
        module (`str`):
            What kind of module it belongs to, the same in all layers: `"self_attn.q_proj"`. Experts of a mixture are
            one kind; a bias is a kind of its own.
    """

    stack: str
    layer: int | None
    module: str

    @property
    def is_input(self) -> bool:
        """Whether the module feeds the layers, as embeddings do."""
        return self.layer is None and any(word in self.module for word in _INPUTS)

    @property
    def is_norm(self) -> bool:
        return "norm" in self.module or "ln_" in self.module


def find_place(name: str) -> Place:
    """Place of a parameter, by the first number in its dotted name: `model.layers.7.self_attn.q_proj.weight`."""
    parts = name.split(".")
    if len(parts) > 1 and parts[-1] == "weight":
        parts.pop()
    at = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    if at is None:
        while len(parts) > 1 and parts[0] in _WRAPPERS:
            parts.pop(0)
        return Place("", None, ".".join(parts))
    module = ".".join(part for part in parts[at + 1 :] if not part.isdecimal())
    return Place(".".join(parts[:at]), int(parts[at]), module or "weight")
