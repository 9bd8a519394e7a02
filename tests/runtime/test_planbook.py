"""Which of several plans for a layer decides."""

import pytest

from moetune.domain.layer import LayerShape
from moetune.runtime.planbook import PlanBook
from tests.runtime.plans import small_plan

LAYER = LayerShape(d_model=8, d_hidden=16, num_experts=4)


@pytest.mark.parametrize(
    ("tokens", "degree"), [(1, 2), (100, 2), (316, 2), (317, 5), (400, 5), (1000, 5), (9000, 5)]
)
def test_the_plan_for_the_nearest_number_of_tokens_by_ratio_decides(
    tokens: int, degree: int
) -> None:
    hundred, thousand = (
        small_plan(
            layer=LAYER, tokens=made_for, degrees=(chunks, chunks),
            ranges=((1, 10_000, chunks, chunks),),
        )
        for made_for, chunks in ((100, 2), (1000, 5))
    )  # fmt: skip
    for plans in ((hundred, thousand), (thousand, hundred)):
        decision = PlanBook(plans).decide(
            LAYER, num_ranks=2, dtype="float32", tokens_per_rank=tokens
        )
        assert (decision.forward_degree, decision.backward_degree) == (degree, degree)
