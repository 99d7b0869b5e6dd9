"""Bit patterns and tiles for the tests of the codec and of the compiled loops."""

import contextlib

import pytest
import torch

from ram_trl.arithmetic import kernels
from ram_trl.arithmetic.methods.method import TileContext, fill_options


HALVES = [torch.bfloat16, torch.float16]
DTYPES = [*HALVES, torch.float32]
INTEGER = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
ENGINES = ["compiled", "torch"]


@contextlib.contextmanager
def computed_by(engine):
    """Compute with the compiled loops, or with the definitions that they must equal."""
    if engine == "compiled" and kernels.compiled is None:
        pytest.skip("the loops are not compiled here")
    with pytest.MonkeyPatch.context() as patch:
        if engine == "torch":
            patch.setattr(kernels, "compiled", None)
        yield


def context_of(method, weights, name="w", start=0, thresholds=None, seed=0, numel=0, **options):
    """What a method is told of a tile."""
    return TileContext(
        name=name,
        start=start,
        agents=[f"agent{position}@v1" for position in range(len(weights))],
        weights=weights,
        factors=[1.0] * len(weights),
        options=fill_options(method, options),
        thresholds=thresholds or [0.0] * len(weights),
        # of agents that are not equally sure
        fishers=[torch.full((numel,), 1.0 + position) for position in range(len(weights))],
        seed=seed,
    )


def bits(values):
    return values.view(INTEGER[values.dtype])


def from_bits(patterns, dtype):
    """A tensor from bit patterns written as unsigned numbers."""
    width = 8 * dtype.itemsize
    signed = [p - 2**width if p >= 2 ** (width - 1) else p for p in patterns]
    return torch.tensor(signed, dtype=INTEGER[dtype]).view(dtype)


def all_patterns(dtype):
    """Every one of the 65,536 values of a 16-bit dtype."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def random_bits(seed, numel, dtype):
    generator = torch.Generator().manual_seed(seed)
    info = torch.iinfo(INTEGER[dtype])
    return torch.randint(info.min, info.max + 1, (numel,), generator=generator).to(INTEGER[dtype]).view(dtype)


def trained(seed, numel, dtype, scale):
    """Weights N(0, 0.02), and what updates N(0, scale) make of them."""
    generator = torch.Generator().manual_seed(seed)
    base = (torch.randn(numel, generator=generator) * 0.02).to(dtype)
    return base, (base.float() + torch.randn(numel, generator=generator) * scale).to(dtype)
