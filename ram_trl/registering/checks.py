"""What is refused of an agent's tensors, whether they are in memory or on disk."""

from torch import Tensor

from ..arithmetic.codec import is_finite, is_mergeable
from ..errors import IncompatibleAgentError, NonFiniteError
from ..storage.checkpoint import OUTPUT_HEAD, Checkpoint


__all__ = ["COMPUTED_BUFFERS", "check_finite", "check_tensors", "diverged"]

# Buffers that old checkpoints hold and models compute anew.
COMPUTED_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuse NaN and infinity.

    Raises:
        NonFiniteError: naming the tensor.
    """
    flat = tensor.detach().cpu().reshape(-1)
    if flat.numel() and not is_finite(flat if is_mergeable(flat.dtype) else flat.float()):
        raise diverged(name)


def diverged(name: str) -> NonFiniteError:
    """The error to raise when a tensor of the agent is not finite."""
    return NonFiniteError(f"tensor {name!r} of the agent holds NaN or infinity: its training diverged")


def check_tensors(shapes: dict[str, tuple[int, ...]], base: Checkpoint) -> None:
    """Refuse a full fine-tune whose tensors are not the base's.

    Args:
        shapes (`dict[str, tuple[int, ...]]`):
            Shapes of the agent's tensors, by the names that the base's files use.

    Raises:
        IncompatibleAgentError: naming the first that differs.
    """
    for name, shape in shapes.items():
        if name not in base.tensors:
            if (name == OUTPUT_HEAD and base.ties_embeddings) or name.endswith(COMPUTED_BUFFERS):
                continue
            raise IncompatibleAgentError(f"the agent has tensor {name!r}, which the base {base.name} lacks")
        expected = base.tensors[name].shape
        if tuple(shape) != expected:
            cure = ""
            if shape and expected and tuple(shape[1:]) == expected[1:]:
                cure = ": the vocabulary was resized; resize the base in the same way, save it, and train from that"
            raise IncompatibleAgentError(
                f"tensor {name!r} has shape {list(shape)}, in the base {base.name} it has {list(expected)}{cure}"
            )
