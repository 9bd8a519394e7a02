"""Sums over a token's choices and dot products, against float64."""

import pytest
import torch

from moetune.runtime.moe.pairs import dots, sum_pairs

T, K, D = 300, 5, 2000


def rows_of(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows in a random order, and each pair's row; the last pairs are dropped."""
    torch.manual_seed(0)
    rows = torch.randn(T * K - 7, D).to(dtype)
    return rows, torch.randperm(T * K).view(T, K)


def dense(rows: torch.Tensor, rows_TK: torch.Tensor) -> torch.Tensor:
    padded = torch.cat((rows.double(), torch.zeros(T * K - len(rows), D, dtype=torch.float64)))
    return padded[rows_TK.view(-1)].view(T, K, D)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_are_rounded_once(dtype: torch.dtype) -> None:
    rows, rows_TK = rows_of(dtype)
    wanted = dense(rows, rows_TK).sum(1)
    found = torch.full((T, D), torch.nan, dtype=dtype)
    sum_pairs(rows, rows_TK, found, drops=True)
    half_a_bit = torch.finfo(dtype).eps / 2
    assert ((found - wanted).abs() <= 1.01 * half_a_bit * wanted.abs() + 1e-5).all()


def test_the_order_of_arrival_changes_no_bit() -> None:
    rows, rows_TK = rows_of(torch.bfloat16)
    other = torch.randperm(len(rows))
    places = torch.arange(T * K)
    places[other] = torch.arange(len(rows))
    first, second = torch.empty(2, T, D, dtype=torch.bfloat16)
    sum_pairs(rows, rows_TK, first, drops=True)
    sum_pairs(rows[other], places[rows_TK], second, drops=True)
    assert torch.equal(first, second)


def test_nothing_kept_is_zero() -> None:
    found = torch.full((3, D), torch.nan)
    sum_pairs(torch.empty(0, D), torch.arange(6).view(3, 2), found, drops=True)
    assert not found.any()


def test_products_of_two_byte_values_are_summed_unrounded() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(T, K, D).bfloat16(), torch.randn(T, D).bfloat16()
    found = torch.empty(T, K)
    dots(a, b, found)
    wanted = torch.einsum("tkd,td->tk", a.double(), b.double())
    assert float((found - wanted).abs().max()) < 1e-4 * D**0.5
