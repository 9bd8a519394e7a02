"""The plan book: which plan decides for a number of tokens, and what a copy of it is."""

import copy
import pickle

import pytest
import torch

from moetune.domain.errors import MoetuneError
from moetune.domain.layer import LayerKey, LayerShape
from moetune.domain.plan import SAFE_DECISION
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.plans.book import PlanBook, share_plans
from tests.runtime.online_workers import train
from tests.runtime.plans import small_plan

SHAPE = LayerShape(d_model=8, d_hidden=16, num_experts=4, top_k=2)
KEY = LayerKey(layer=SHAPE, num_ranks=2, dtype="float32")
ANY = 10**6


@pytest.mark.parametrize(
    ("tokens", "degree"), [(0, 2), (100, 2), (316, 2), (317, 8), (400, 8), (1000, 8), (ANY, 8)]
)
def test_the_plan_nearest_by_the_ratio_of_tokens_decides(tokens: int, degree: int) -> None:
    """The middle of 100 and 1,000 is their geometric mean, 316.2."""
    book = PlanBook(
        small_plan(
            layer=SHAPE,
            tokens=made_for,
            degrees=(chunks, chunks),
            ranges=((1, ANY, chunks, chunks),),
        )
        for made_for, chunks in ((100, 2), (1000, 8))
    )
    decision = book.decide(KEY, tokens_per_rank=tokens)
    assert (decision.forward_degree, decision.backward_degree) == (degree, degree)


def test_a_layer_without_a_plan_runs_the_safe_plan() -> None:
    book = PlanBook([small_plan(layer=SHAPE, world_size=4)])
    assert book.layer_plans(KEY).plans == ()
    assert book.decide(KEY, tokens_per_rank=40) == SAFE_DECISION


def test_a_copied_book_is_itself_and_a_pickled_book_has_its_plans() -> None:
    book = PlanBook([small_plan(layer=SHAPE)])
    assert copy.deepcopy(book) is book
    saved = pickle.loads(pickle.dumps(book))  # noqa: S301 - written above
    assert (saved.plans, saved.version) == (book.plans, book.version)


def test_a_copied_and_a_saved_layer_run_the_plan() -> None:
    plan = small_plan(layer=SHAPE, world_size=1, dtype="float64")
    layer = MoELayer(8, 16, 4, 2, plan=PlanBook([plan]), dtype=torch.float64)
    train(layer, 40)
    saved = pickle.loads(pickle.dumps(layer))  # noqa: S301 - written above
    for moe in (layer, copy.deepcopy(layer), saved):
        train(moe, 40)
        assert moe.decision == plan.decide(40)


def test_layers_whose_plan_could_not_be_had_run_one_chunk_without_another_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for is_complete in (False, True):
        book = PlanBook((), is_complete=is_complete)
        layer = MoELayer(8, 16, 4, 2, plan=book, dtype=torch.float64)
        train(layer, 40)
        assert layer.decision == SAFE_DECISION
        assert ("no plan for" in caplog.text) is is_complete


def test_whatever_stops_the_first_rank_is_an_error_that_travels() -> None:
    def find() -> PlanBook:
        raise RuntimeError("can't start new thread")

    with pytest.raises(MoetuneError, match="new thread"):
        share_plans(find)
