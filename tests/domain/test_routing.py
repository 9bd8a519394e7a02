"""Skew of routing, against ranks that are filled by drawing tokens."""

import numpy as np
import pytest

from moetune.domain.errors import InputError
from moetune.domain.routing import BALANCED, NATURAL, ExpertLoads, natural_loads


def test_even_loads_and_a_single_rank_have_no_skew() -> None:
    assert BALANCED.skew(128, 8, 32) == 1
    assert NATURAL.skew(128, 8, 1) == 1
    assert ExpertLoads(name="even", loads=(3.0,) * 64).skew(64, 4, 8) == pytest.approx(1)


@pytest.mark.parametrize(("experts", "top_k", "ep"), [(128, 8, 8), (64, 2, 16), (256, 8, 64)])
def test_the_skew_of_a_law_is_that_of_drawn_tokens(experts: int, top_k: int, ep: int) -> None:
    loads = np.array(natural_loads(experts))
    drawn = np.random.default_rng(1)
    skews = []
    for _ in range(40):
        chances = drawn.permutation(loads / loads.sum())
        keys = np.log(chances) + drawn.gumbel(size=(2000, experts))
        chosen = np.argsort(-keys, axis=1)[:, :top_k]  # k different experts for each token
        counts = np.bincount(chosen.ravel(), minlength=experts)
        skews.append(counts.reshape(ep, -1).sum(axis=1).max() / (2000 * top_k / ep))
    assert NATURAL.skew(experts, top_k, ep) == pytest.approx(float(np.mean(skews)), rel=0.25)


def test_no_expert_gets_a_token_twice() -> None:
    assert ExpertLoads(name="one", loads=(1.0, 0.0, 0.0, 0.0)).skew(4, 2, 4) == pytest.approx(2)
    assert ExpertLoads(name="two", loads=(5.0, 5.0, 1.0, 1.0)).skew(4, 4, 4) == pytest.approx(1)
    assert NATURAL.skew(8, 2, 8) <= 4


@pytest.mark.parametrize(("loads", "words"), [
    ((), "routing f is empty"),
    ((0.0, 0.0), "all 2 loads are 0"),
    ((1.0, -2.0), "the load of expert 1 is -2"),
    ((float("nan"), 1.0), "the load of expert 0 is nan"),
    ((1.0, 1.0, float("inf")), "the load of expert 2 is inf"),
])  # fmt: skip
def test_the_error_names_the_load_that_is_wrong(loads: tuple[float, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        ExpertLoads(name="f", loads=loads)


def test_the_fullest_rank_is_that_of_the_experts_in_their_places() -> None:
    loads = ExpertLoads(name="f", loads=(5.0, 4.0, 2.0, 1.0))
    assert loads.skew_in_order(4, 1, 2) == pytest.approx(1.5)
    assert loads.skew_in_order(4, 1, 2, (0, 3, 1, 2)) == pytest.approx(1.0)
    assert NATURAL.skew_in_order(4, 1, 2, (0, 3, 1, 2)) == NATURAL.skew(4, 1, 2)


def test_the_fullest_ranks_experts_have_its_rows_between_them() -> None:
    loads = ExpertLoads(name="file", loads=(1.0, 2.0, 4.0, 3.0, 5.0, 1.0))
    assert loads.fullest_shares(6, 1, 3) == pytest.approx((4 / 7, 3 / 7))
    placed = loads.fullest_shares(6, 1, 3, experts=(0, 5, 2, 4, 1, 3))
    assert placed == pytest.approx((5 / 9, 4 / 9))
    assert loads.fullest_shares(6, 1, 1) == pytest.approx([n / 16 for n in (5, 4, 3, 2, 1, 1)])
    assert BALANCED.fullest_shares(6, 1, 3) == ()
    law = NATURAL.fullest_shares(64, 2, 8)
    assert len(law) == 8
    assert sum(law) == pytest.approx(1)
    assert list(law) == sorted(law, reverse=True)
    assert law[0] > 2 / 8
