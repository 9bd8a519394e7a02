"""Sums of rows by token, and dot products, against float64; rows of tokens that travel once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.runtime.moe.dispatch import TokenPermutation
from moetune.runtime.moe.pairs import dots
from moetune.runtime.moe.token_rows import RowSums

T, K, D = 300, 5, 2000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_are_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tokens, rows = torch.randint(T, (T * K,)), torch.randn(T * K, D).to(dtype)
    wanted = torch.zeros(T, D, dtype=torch.float64).index_add_(0, tokens, rows.double())
    sums = RowSums.by(tokens, T).of(rows, slice(0, None), slice(0, None))
    half_a_bit = torch.finfo(dtype).eps / 2
    assert ((sums - wanted).abs() <= 1.01 * half_a_bit * wanted.abs() + 1e-5).all()


def test_nothing_kept_is_zero() -> None:
    sums = RowSums.by(torch.empty(0, dtype=torch.int64), 3)
    assert not sums.of(torch.empty(0, D), slice(0, None), slice(0, None)).any()


@given(
    num_ranks=st.integers(2, 5), local=st.integers(2, 3), top_k=st.integers(1, 4),
    degree=st.integers(1, 3), num_tokens=st.integers(0, 9), seed=st.integers(0, 99),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_a_token_travels_once_to_each_rank_of_its_experts(
    num_ranks: int, local: int, top_k: int, degree: int, num_tokens: int, seed: int
) -> None:
    torch.manual_seed(seed)
    experts = torch.rand(num_tokens, num_ranks * local).argsort(1)[:, :top_k]
    kept = torch.rand(num_tokens, top_k) < 0.8
    sent = TokenPermutation(
        experts, kept, num_experts=num_ranks * local, num_ranks=num_ranks, degree=degree
    ).tokens
    assert sent is not None
    wanted: list[list[list[int]]] = [[[] for _ in range(num_ranks)] for _ in range(degree)]
    for token in range(num_tokens):
        ranks = {int(expert) // local for expert in experts[token][kept[token]]}
        for rank in ranks:
            wanted[((token + 1) * degree - 1) // num_tokens][rank].append(token)
    assert sent.counts_CP.tolist() == [[len(some) for some in chunk] for chunk in wanted]
    rows = [token for chunk in wanted for some in chunk for token in some]
    assert sent.tokens(len(rows)).tolist() == rows


def test_products_of_two_byte_values_are_summed_unrounded() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(T, K, D).bfloat16(), torch.randn(T, D).bfloat16()
    sums = torch.empty(T, K)
    dots(a, b, sums)
    wanted = torch.einsum("tkd,td->tk", a.double(), b.double())
    assert float((sums - wanted).abs().max()) < 1e-4 * D**0.5
