"""The compiled loops of _kernels.c, where the installation has them; everything works without, slower.

torch and numpy code elsewhere in this package defines what is computed. A function that has a compiled twin asks for
it here; the tests hold both to the same bits.
"""

import sys
from types import ModuleType

import torch


__all__ = ["KERNEL_DTYPES", "compiled"]

# Numbers of the dtypes in _kernels.c.
KERNEL_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}

try:
    from . import _kernels
except ImportError:
    _kernels = None

# The loops read and write numbers in the processor's order of bytes, files are little-endian.
compiled: ModuleType | None = _kernels if sys.byteorder == "little" else None
