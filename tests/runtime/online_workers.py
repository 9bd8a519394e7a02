"""What ranks do in the tests of the online plan book: layers whose times are made up."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moetune.app.tuning import StudyTuner
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerKey, LayerShape, Phase
from moetune.domain.plan import Decision, Plan
from moetune.domain.records import Settled
from moetune.runtime.moe.layer import ExpertLayer, MoELayer
from moetune.runtime.plans.book import PlanBook, share_plans
from moetune.runtime.plans.online import OnlineSearch
from moetune.runtime.plans.tuner import Tuner, TuningTask
from moetune.store import open_store
from tests.runtime.faults import make
from tests.runtime.plans import small_plan
from tests.runtime.workers import relative_error

SHAPE = LayerShape(d_model=8, d_hidden=16, num_experts=4, top_k=2)
HARDWARE_ID = "0123456789abcdef"
_COLLECTIVES = (
    "all_gather", "all_gather_object", "all_reduce", "all_to_all_single", "barrier",
    "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "irecv", "isend",
)  # fmt: skip
Times = Callable[[Phase, int], float]
"""(phase, degree) -> seconds."""


class MadeUp:
    """A time that is known beforehand."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def since(self, _: object) -> float:
        return self._seconds


class MadeUpClock:
    """Times of the decision that `layer` runs with; set it after the layer is made.

    Args:
        of_strategy: seconds by strategy, in place of the times.
    """

    def __init__(self, times: Times, of_strategy: Mapping[str, float] | None = None) -> None:
        self.layer: ExpertLayer | None = None
        self.num_stamps = 0
        self._times, self._of_strategy = times, of_strategy

    def __call__(self, phase: Phase, _: torch.device) -> MadeUp:
        assert self.layer is not None
        decision = self.layer.decision
        self.num_stamps += 1
        if self._of_strategy is not None:
            return MadeUp(self._of_strategy[decision.strategy])
        is_forward = phase == "forward"
        return MadeUp(
            self._times(phase, decision.forward_degree if is_forward else decision.backward_degree)
        )


class CountedTuner:
    """Counts what another is asked."""

    def __init__(self, tuner: Tuner) -> None:
        self.tasks: list[TuningTask] = []
        self.settled: list[Settled] = []
        self.num_tells = 0
        self._tuner = tuner

    def begin(self, task: TuningTask) -> Decision | Settled:
        self.tasks.append(task)
        return self._seen(self._tuner.begin(task))

    def tell(self, seconds: float) -> Decision | Settled:
        self.num_tells += 1
        return self._seen(self._tuner.tell(seconds))

    def _seen(self, said: Decision | Settled) -> Decision | Settled:
        if isinstance(said, Settled):
            self.settled.append(said)
        return said


def study_tuner(folder: Path) -> CountedTuner:
    return CountedTuner(
        StudyTuner(
            folder=folder / "searches",
            hardware_id=HARDWARE_ID,
            stores=lambda: open_store(f"{folder}/moetune.db"),
        )
    )


def best_at(forward: int, backward: int) -> Times:
    """Times with a clear best degree for each phase."""
    best = {"forward": forward, "backward": backward}
    return lambda phase, degree: 1.0 + 0.1 * abs(degree - best[phase])


def plan_of(num_ranks: int) -> Plan:
    return small_plan(layer=SHAPE, world_size=num_ranks, dtype="float64")


def online_layer(
    folder: Path, times: Times, **options: object
) -> tuple[MoELayer, PlanBook, MadeUpClock, CountedTuner]:
    clock, tuner = MadeUpClock(times), study_tuner(folder)
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    search = OnlineSearch(make_tuner=lambda: tuner, clock=clock)
    book = PlanBook([plan_of(num_ranks)], search=search)
    layer = make(pipeline=True, plan=book, dtype=torch.float64, **options)
    clock.layer = layer
    return layer, book, clock, tuner


def train(layer: ExpertLayer, tokens: int) -> torch.Tensor:
    """Take one step on so many tokens of this rank."""
    layer.zero_grad()
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 8, dtype=torch.float64, generator=generator)
    y: torch.Tensor = layer(x)
    (y.square().sum() + layer.aux_loss).backward()
    return y.detach()


@contextmanager
def counted_collectives() -> Iterator[list[str]]:
    """Yield a list that every collective of this rank adds its name to."""
    names: list[str] = []

    def counted(name: str) -> Callable[..., object]:
        real = getattr(dist, name)

        def call(*args: object, **options: object) -> object:
            names.append(name)
            return real(*args, **options)

        return call

    with ExitStack() as stack:
        for name in _COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, counted(name)))
        yield names


def _agree(layer: MoELayer) -> None:
    decisions: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(decisions, layer.decision)
    assert len(set(decisions)) == 1, decisions


def random_tokens(folder: Path) -> None:
    """Train on random sizes until all are settled: equal decisions, numbers of one chunk."""
    rank = dist.get_rank()
    sizes = torch.randint(20, 60, (3, 2), generator=torch.Generator().manual_seed(3))
    # The slowest rank counts: rank 1 is best at 6, the other one at 3.
    mine = best_at(6, 6) if rank else best_at(3, 3)
    factor = 10 if rank else 1
    layer, book, clock, tuner = online_layer(folder, lambda *step: factor * mine(*step))
    reference = make(pipeline=False, dtype=torch.float64)
    tried: set[Decision] = set()
    for step in range(600):
        if step and not any(_is_open(book, tokens) for tokens in sizes.amax(dim=1).tolist()):
            break
        tokens = int(sizes[step % len(sizes), rank])
        y = train(layer, tokens)
        if layer.decision not in tried:
            _check_against(reference, layer, y, tokens)
        tried.add(layer.decision)
        _agree(layer)
        book.step()
    else:
        raise AssertionError("the ranges did not close")
    assert len(tried) > 3
    assert (tuner.num_tells > 0) == (rank == 0)
    _nothing_more_happens(layer, book, clock, tuner, sizes[:, rank].tolist())


def _check_against(reference: MoELayer, layer: MoELayer, y: torch.Tensor, tokens: int) -> None:
    assert relative_error(y, train(reference, tokens)) <= 1e-12
    for parameter, other in zip(layer.parameters(), reference.parameters(), strict=True):
        assert parameter.grad is not None
        assert other.grad is not None
        assert relative_error(parameter.grad, other.grad) <= 1e-12


def _is_open(book: PlanBook, tokens: int) -> bool:
    key = LayerKey(layer=SHAPE, num_ranks=2, dtype="float64")
    search = book._search
    assert search is not None
    return search.layer(key, book.plans_for(key), None).settled(tokens) is None


def _nothing_more_happens(
    layer: MoELayer, book: PlanBook, clock: MadeUpClock, tuner: CountedTuner, sizes: Sequence[int]
) -> None:
    """Once all is settled a step is as one with a pinned degree: no search, no collective."""
    before = tuner.num_tells, len(tuner.tasks), clock.num_stamps
    plain = make(pipeline=True, dtype=torch.float64)
    for tokens in sizes:  # the first step of another decision exchanges its counts once more
        train(layer, tokens)
    plain.pin(layer.decision)
    train(plain, sizes[0])  # and so does the ranks' first meeting
    for tokens in sizes:
        with counted_collectives() as names:
            train(layer, tokens)
            book.step()
        assert (layer.decision.forward_degree, layer.decision.backward_degree) == (6, 6)
        plain.pin(layer.decision)
        with counted_collectives() as plain_names:
            train(plain, tokens)
        assert names == plain_names
    assert (tuner.num_tells, len(tuner.tasks), clock.num_stamps) == before


def failing_tuner() -> None:
    """The first rank's search fails: all go on with the plan, and with what was settled."""
    decision = Decision(forward_degree=5, backward_degree=5)
    known = Settled(
        plan_id=plan_of(2).id, hardware_id=HARDWARE_ID, memory_reuse=None, tokens_per_rank=90,
        decision=decision, seconds=(1.0,), planned_seconds=1.0, num_steps=9,
    )  # fmt: skip

    def find() -> PlanBook:
        assert dist.get_rank() == 0
        return PlanBook([plan_of(2)])

    def fail() -> Tuner:
        raise OSError("no space left on device")

    book = share_plans(find, find_settled=lambda _: [known], make_tuner=fail)
    layer = make(pipeline=True, plan=book, dtype=torch.float64)
    for _ in range(3):
        train(layer, 90)
        assert layer.decision == decision
        train(layer, 40)
        assert layer.decision == plan_of(2).decide(40)
        book.step()
    with counted_collectives() as names:
        book.step()
    assert names == []


def settle_with(
    plan: Plan, seconds: Mapping[str, float], folder: Path
) -> tuple[set[Decision], MoELayer]:
    """Search one size with real ranks: equal decisions, and the numbers of one chunk."""
    clock, tuner = MadeUpClock(best_at(1, 1), seconds), study_tuner(folder)
    book = share_plans(lambda: PlanBook([plan]), make_tuner=lambda: tuner)
    search = book._search
    assert search is not None
    search.clock = clock
    shape = plan.inputs.layer
    sizes = (shape.d_model, shape.d_hidden, shape.num_experts, shape.top_k)
    clock.layer = layer = MoELayer(*sizes, plan=book, dtype=torch.float64)
    reference = MoELayer(*sizes, pipeline=False, memory_reuse=False, dtype=torch.float64)
    reference.load_state_dict(layer.state_dict())
    tried: set[Decision] = set()
    key = plan.workload.key
    for _ in range(200):
        y = train(layer, 40)
        if layer.decision not in tried:
            _check_against(reference, layer, y, 40)
        tried.add(layer.decision)
        _agree(layer)
        book.step()
        if search.layer(key, book.plans_for(key), None).settled(40) is not None:
            train(layer, 40)
            _agree(layer)
            return tried, layer
    raise AssertionError("the search does not end")


def strategies(plan: Plan, folder: Path) -> None:
    """Where memory is short strategies are tried; a slow one is left, and the fastest stays."""
    seconds = {"none": 1.0, "S1": 4.0, "S2": 0.5, "S3": 1.1, "S4": 1.2}
    tried, layer = settle_with(plan, seconds, folder)
    assert len({trial.strategy for trial in tried}) > 2
    assert layer.decision.strategy == "S2"


def group_of_another_size() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    search = OnlineSearch(make_tuner=lambda: study_tuner(Path()), group=alone)
    book = PlanBook([plan_of(2)], search=search)
    layer = make(pipeline=True, plan=book, dtype=torch.float64)
    with pytest.raises(InputError, match="layer's group"):
        train(layer, 40)


def steps_until_settled(
    layer: ExpertLayer, book: PlanBook, tuner: CountedTuner, tokens: Sequence[int]
) -> int:
    """Train until as many sizes are settled, and return the number of steps."""
    wanted = len(tuner.settled) + len(tokens)
    for step in range(1, 300):
        train(layer, tokens[(step - 1) % len(tokens)])
        book.step()
        if len(tuner.settled) == wanted:
            return step
    raise AssertionError("the search does not end")
