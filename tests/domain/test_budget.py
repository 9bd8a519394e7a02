"""A whole training: days, GPU-hours and cost follow from its steps; wrong numbers are refused."""

from fractions import Fraction
from math import ceil, isclose

import pytest

from moetune.domain.budget import Budget, Spread
from moetune.domain.errors import InputError
from moetune.domain.question import read_question, read_texts

SECONDS = Spread(p05=8.5, predicted=10.0, p95=14.0)


@pytest.mark.parametrize(
    ("tokens", "count"),
    [("1T", 10**12), ("500b", 5 * 10**11), ("1.5e12", 15 * 10**11), ("300000", 300_000)],
)
@pytest.mark.parametrize(("price", "share"), [("2.5", "0.9"), ("", ""), ("0", "1")])
def test_days_hours_and_cost_follow_from_the_steps(
    tokens: str, count: int, price: str, share: str
) -> None:
    texts = {"train_tokens": tokens, "price": price, "utilization": share}
    budget = read_question(read_texts(texts)).budget
    assert budget is not None
    run = budget.run(SECONDS, tokens_per_step=1024 * 4096, world_size=64)
    steps = ceil(Fraction(count, 1024 * 4096))
    assert run.steps == steps
    for end in ("p05", "predicted", "p95"):
        wall = steps * Fraction(getattr(SECONDS, end)) / Fraction(share or "1")
        assert isclose(getattr(run.days, end), wall / 86_400)
        assert isclose(getattr(run.gpu_hours, end), wall * 64 / 3600)
        if price:
            assert run.cost
            assert isclose(getattr(run.cost, end), wall * 64 / 3600 * Fraction(price))
    assert price or run.cost is None


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"train_tokens": "15"}, "--train-tokens: number of tokens '15' has no unit"),
        ({"train_tokens": "1Tb"}, "--train-tokens: number of tokens '1Tb' must be a number of 1"),
        ({"train_tokens": "inf"}, "--train-tokens: number of tokens 'inf' must be a number of 1"),
        ({"train_tokens": "1e30"}, "--train-tokens is too large"),
        ({"train_tokens": "1T", "price": "-1"}, "--price must be from 0 to 1000000, got -1"),
        ({"train_tokens": "1T", "price": "nan"}, "--price must be"),
        ({"train_tokens": "1T", "utilization": "1.1"}, "--utilization must be from 0.01 to 1"),
        ({"price": "2"}, "--price needs --train-tokens"),
        ({"utilization": "0.9"}, "--utilization needs --train-tokens"),
    ],
)
def test_a_wrong_number_is_refused_by_its_flag(texts: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        _ = read_question(read_texts(texts)).budget
    assert caught.value.what.startswith(message)
    assert caught.value.field in texts


def test_a_document_with_a_wrong_number_is_refused() -> None:
    for values in ({"train_tokens": 0}, {"train_tokens": 1, "utilization": 2.0}):
        with pytest.raises(InputError, match="must be from"):
            Budget(**values)
