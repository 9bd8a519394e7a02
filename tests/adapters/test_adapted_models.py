"""Adapted models of every family against transformers' own, on real ranks."""

import pytest

from tests.adapters import workers
from tests.adapters.tiny_models import FAMILIES
from tests.ranks import run_ranks

FIRST = ("Mixtral", "Qwen3Moe", "GptOss")
"""Halves in both layouts, and interleaved parts with biases."""


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_equals_the_model(family: str) -> None:
    workers.equal_models([family], (1, 3), ("none", "S2"))


@pytest.mark.parametrize(("num_ranks", "degrees"), [(2, (1, 2, 3)), (4, (2,))])
def test_ranks_with_uneven_tokens_equal_the_model(num_ranks: int, degrees: tuple[int, ...]) -> None:
    assert run_ranks(workers.equal_models, num_ranks, FIRST, degrees) == [""] * num_ranks


def test_every_family_equals_its_model_on_two_ranks() -> None:
    rest = [family for family in FAMILIES if family not in FIRST]
    assert run_ranks(workers.equal_models, 2, rest, (2,), ("none", "S3")) == [""] * 2
