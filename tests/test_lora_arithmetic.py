"""Deltas of low-rank adapters, against the full product."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ram_trl.arithmetic.lora import LoraFactors, lora_delta, visible_delta


def peft_factors(rows, columns, rank, transposed, seed=0, dtype=torch.float32):
    """PEFT's A (rank, in) and B (out, rank) for a weight that is stored as (rows, columns)."""
    generator = torch.Generator().manual_seed(seed)
    size_in, size_out = (rows, columns) if transposed else (columns, rows)
    factor_a = torch.randn(rank, size_in, generator=generator).to(dtype)
    factor_b = torch.randn(size_out, rank, generator=generator).to(dtype)
    return factor_a, factor_b


def full_delta(factor_a, factor_b, scaling, transposed):
    """What PEFT's `get_delta_weight` computes, in float64."""
    product = factor_b.double() @ factor_a.double() * scaling
    return product.T if transposed else product


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    rank=st.integers(1, 4),
    transposed=st.booleans(),
    scaling=st.sampled_from([1.0, 0.5, 2.0, 16 / 6]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    ends=st.tuples(st.integers(0, 81), st.integers(0, 81)),
)
@settings(max_examples=200, deadline=None)
def test_any_flat_range_is_that_slice_of_the_full_product(rows, columns, rank, transposed, scaling, dtype, ends):
    factor_a, factor_b = peft_factors(rows, columns, rank, transposed, dtype=dtype)
    full = full_delta(factor_a, factor_b, scaling, transposed).reshape(-1)
    start, stop = sorted(min(end, rows * columns) for end in ends)
    if start == stop:
        return
    factors = LoraFactors.from_peft(factor_a, factor_b, scaling, transposed)
    assert factors.left.shape == (rows, rank) and factors.right.shape == (rank, columns)
    delta = lora_delta(factors, start, stop)
    assert delta.dtype == torch.float32 and delta.shape == (stop - start,)
    torch.testing.assert_close(delta.double(), full[start:stop], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_ranges_of_one_row_of_many_rows_and_of_row_edges(transposed):
    factors = LoraFactors.from_peft(*peft_factors(5, 4, 2, transposed), 2.0, transposed)
    full = (factors.left @ factors.right * 2.0).reshape(-1)
    for start, stop in [(0, 20), (0, 4), (4, 8), (5, 7), (3, 5), (2, 19), (16, 20), (19, 20)]:
        torch.testing.assert_close(lora_delta(factors, start, stop), full[start:stop])


def test_single_element_is_the_scaled_dot_product():
    factors = LoraFactors.from_peft(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[10.0], [100.0]]), 0.5, False)
    assert lora_delta(factors, 0, 6).tolist() == [5.0, 10.0, 15.0, 50.0, 100.0, 150.0]
    assert lora_delta(factors, 4, 5).tolist() == [100.0]
    transposed = LoraFactors.from_peft(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[10.0], [100.0]]), 0.5, True)
    assert lora_delta(transposed, 0, 6).tolist() == [5.0, 50.0, 10.0, 100.0, 15.0, 150.0]


def test_computing_a_range_changes_no_factor():
    factors = LoraFactors.from_peft(*peft_factors(3, 3, 2, False), 4.0, False)
    kept = factors.left.clone(), factors.right.clone()
    first = lora_delta(factors, 0, 9)
    assert torch.equal(lora_delta(factors, 0, 9), first)
    assert torch.equal(factors.left, kept[0]) and torch.equal(factors.right, kept[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_delta_counts_where_adding_it_changes_the_base_in_its_own_dtype(dtype):
    generator = torch.Generator().manual_seed(0)
    base = (torch.randn(4000, generator=generator) * 0.02).to(dtype)
    delta = torch.randn(4000, generator=generator) * 10.0 ** torch.randint(-12, -2, (4000,), generator=generator)
    visible = visible_delta(delta, base)
    changed = (base.float() + delta).to(dtype) != base
    assert changed.any() and not changed.all()
    # kept in float32 to the bit, not as rounded
    assert torch.equal(visible[changed], delta[changed])
    assert torch.equal(visible[~changed], torch.zeros(int((~changed).sum())))


def test_visibility_turns_at_half_a_place_of_the_base():
    base = torch.ones(4, dtype=torch.bfloat16)
    half = 2.0**-8  # bfloat16 has 2**-7 above 1; a tie goes to the even 1
    delta = torch.tensor([half, half * 1.01, -half / 2, -half / 2 * 1.01])
    assert (visible_delta(delta, base) != 0).tolist() == [False, True, False, True]


def test_every_delta_is_visible_over_a_base_of_zero():
    delta = torch.tensor([1e-20, -1e-30, 0.0])
    assert torch.equal(visible_delta(delta, torch.zeros(3, dtype=torch.bfloat16)), delta)
