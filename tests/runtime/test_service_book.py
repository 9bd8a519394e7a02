"""The book of a service: which calls of a layer are timed, and what is said of them."""

import copy
import pickle
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from moetune.domain.errors import MoetuneError
from moetune.domain.layer import PHASES
from moetune.domain.operations import Operation
from moetune.domain.plan import Decision, Plan
from moetune.domain.records import Observation
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.plans.book import PlanBook, share_plans
from moetune.runtime.plans.reports import ObservationSender, StepReporter
from tests.runtime.online_workers import SHAPE, MadeUp, train
from tests.runtime.plans import small_plan

# Its degrees are chosen, so that no first step tries one chunk instead.
PLAN = small_plan(
    layer=SHAPE, world_size=1, dtype="float64", constraints={"forward-degree": "4"}
)  # fmt: skip


class Kept(ObservationSender):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__(lambda _: None)
        self.observations: list[Observation] = []

    def add(self, observation: Observation) -> None:
        self.observations.append(observation)


def book_of(*plans: Plan, every: int = 1, known: Sequence[Plan] = (PLAN,)) -> tuple[PlanBook, Kept]:
    sender = Kept()
    reporter = StepReporter(
        sender, plan_ids=[plan.id for plan in known], every=every, device_id="0123456789abcdef"
    )
    clock = lambda phase, _: MadeUp(2.0 if phase == "forward" else 3.0)  # noqa: E731 - a `Clock`
    return PlanBook(plans or (PLAN,), reporter=reporter, clock=clock), sender


def layer_of(book: PlanBook, **options: object) -> MoELayer:
    arguments: dict[str, object] = {"planbook": book, "dtype": torch.float64} | options
    return MoELayer(8, 16, 4, 2, **arguments)  # type: ignore[arg-type] # options of any kind


def test_a_call_is_reported_beside_what_the_plan_said_of_its_pipelined_part() -> None:
    book, sender = book_of()
    layer = layer_of(book)
    train(layer, 40)
    book.close()
    (found,) = sender.observations
    assert replace(found, operations=()) == Observation(
        plan_id=PLAN.id, forward_degree=4, backward_degree=4, tokens_per_rank=40,
        predicted_seconds=2.0, seconds=(5.0,), source="training", device_id="0123456789abcdef",
    )  # fmt: skip
    # 40 tokens of 2 choices in 4 chunks of 8 x 16 experts; one rank exchanges nothing.
    assert [times.operation for times in found.operations] == [
        Operation(name="experts", phase=phase, size=20 * 8 * 16, degree=4) for phase in PHASES
    ]
    assert all(0 < times.seconds[0] < 60 for times in found.operations)


@pytest.mark.parametrize(("every", "expected"), [(1, 14), (3, 4), (50, 0)])
def test_every_so_many_th_call_of_each_layer_is_timed(every: int, expected: int) -> None:
    book, sender = book_of(every=every)
    layers = [layer_of(book) for _ in range(2)]
    for _ in range(7):
        for layer in layers:
            train(layer, 40)
    book.close()
    assert len(sender.observations) == expected


@pytest.mark.parametrize(
    ("tokens", "known", "options", "num_reports"),
    [
        (40, (PLAN,), {}, 1),
        (40, (PLAN,), {"memory_reuse": False}, 1),
        (40, (PLAN,), {"memory_reuse": "S4"}, 0),
        (41, (PLAN,), {}, 0),
        (40, (), {}, 0),
    ],
)
def test_calls_that_a_plan_of_the_service_predicts_are_reported(
    tokens: int, known: Sequence[Plan], options: dict[str, object], num_reports: int
) -> None:
    book, sender = book_of(known=known)
    layer = layer_of(book, **options)
    train(layer, tokens)
    layer.pin(Decision(forward_degree=2, backward_degree=2))
    train(layer, tokens)
    train(layer, tokens)
    book.close()
    assert len(sender.observations) == num_reports


def test_evaluation_is_not_timed_and_a_step_that_was_left_is_forgotten() -> None:
    book, sender = book_of()
    layer = layer_of(book)
    x = torch.randn(40, 8, dtype=torch.float64)
    with torch.no_grad():
        layer(x)
    layer(x)
    train(layer, 40)
    book.close()
    assert len(sender.observations) == 1


def test_a_copied_model_reports_to_the_same_service_and_a_saved_one_to_none() -> None:
    book, sender = book_of()
    layer = layer_of(book)
    with torch.no_grad():
        layer(torch.randn(40, 8, dtype=torch.float64))
    for one in (layer, copy.deepcopy(layer)):
        train(one, 40)
    loaded = pickle.loads(pickle.dumps(book))  # noqa: S301 - our own
    assert loaded.plans == book.plans
    saved = pickle.loads(pickle.dumps(layer))  # noqa: S301 - our own
    train(saved, 40)
    assert saved.decision == PLAN.decide(40)
    book.close()
    assert len(sender.observations) == 2


def test_layers_whose_plan_could_not_be_had_run_one_chunk_without_another_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    book = PlanBook((), is_complete=False)
    layer = layer_of(book)
    train(layer, 40)
    assert layer.decision == Decision(forward_degree=1, backward_degree=1)
    assert caplog.text == ""
    layer = layer_of(PlanBook(()))
    train(layer, 40)
    assert "no plan for" in caplog.text


def test_whatever_stops_the_first_rank_is_an_error_that_travels() -> None:
    def find() -> PlanBook:
        raise RuntimeError("can't start new thread")

    with pytest.raises(MoetuneError, match="new thread"):
        share_plans(find)


def test_a_book_that_reports_nothing_closes() -> None:
    book = share_plans(lambda: PlanBook([PLAN]))
    train(layer_of(book), 40)
    book.close()
    assert book.plans == (PLAN,)
