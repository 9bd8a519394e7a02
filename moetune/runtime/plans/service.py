"""A plan book from a plan service: the first rank asks, and reports what its steps take."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from moetune.domain.constraints import Strategy
from moetune.domain.document import canonical_json
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.layer import ExpertParallel, LayerShape
from moetune.domain.plan import SAFE_DECISION, Decision, Plan, plan_from_json
from moetune.domain.records import Observation
from moetune.runtime.agree import Council
from moetune.runtime.plans.book import LayerPlans, PlanBook
from moetune.runtime.plans.observe import ObservationSender
from moetune.runtime.plans.stopwatch import CallWatch, Clock, NoWatch, Watch, device_clock

OBSERVE_EVERY = 50
"""Calls of a layer between two that are timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """Where the first rank reports to, and about which plans.

    Args:
        plan_ids: plans that the service knows.
        every: calls of a layer between two that are timed; at least 1.
        clock: what calls are timed with.
    """

    sender: ObservationSender
    plan_ids: Collection[str]
    every: int = OBSERVE_EVERY
    clock: Clock = device_clock

    def __post_init__(self) -> None:
        if self.every < 1:
            raise InputError(f"observe_every must be at least 1, got {self.every}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlans:
    """What the first rank has to share.

    Args:
        plans: of the service, files and the store.
        is_complete: whether each plan that was asked for was had, or its lack is no news.
        reports: None where nothing is reported.
    """

    plans: Sequence[Plan]
    is_complete: bool = True
    reports: Reports | None = None


class ReportingLayerPlans(LayerPlans):
    """The plans for one layer on one group, on the rank that reports.

    Only calls that the plan has a prediction for are timed: those of its own number of tokens,
    with its own strategy.

    Args:
        memory_reuse: the strategy that the layer is told to use.
    """

    def __init__(
        self, plans: Sequence[Plan], reports: Reports, memory_reuse: Strategy | None
    ) -> None:
        super().__init__(plans)
        self._reports = reports
        self._observed: dict[int, Plan | None] = {}
        for plan in plans:
            is_known = plan.id in reports.plan_ids
            is_planned = memory_reuse in {None, plan.memory.strategy}
            tokens = plan.workload.tokens_per_rank
            self._observed.setdefault(tokens, plan if is_known and is_planned else None)
        self._num_calls = 0
        self._timed: tuple[CallWatch, Plan] | None = None

    def __deepcopy__(self, _: object) -> "ReportingLayerPlans":
        return self

    def __reduce__(self) -> tuple[type[LayerPlans], tuple[Sequence[Plan]]]:
        return LayerPlans, (self._plans,)

    def watch(self, tokens_per_rank: int, device: torch.device) -> Watch:
        """Return what times every so many-th call; report the one before where it is over."""
        plan = self._observed.get(tokens_per_rank)
        if plan is None:
            return NoWatch()
        self.report()
        self._num_calls += 1
        if self._num_calls % self._reports.every:
            return NoWatch()

        def note(call: CallWatch) -> None:
            self._timed = call, plan

        return CallWatch(self._reports.clock, device, tokens_per_rank=tokens_per_rank, note=note)

    def report(self) -> None:
        """Hand on the call that was timed, once its backward pass is over; never wait for it."""
        if self._timed is None or not self._timed[0].is_over():
            return
        (call, plan), self._timed = self._timed, None
        seconds = call.seconds()
        if seconds is not None:
            self._reports.sender.add(_observation(plan, sum(seconds)))


class SafeLayerPlans(LayerPlans):
    """For a layer whose plan could not be had: one chunk, nothing reused."""

    def __init__(self) -> None:
        super().__init__(())

    def _look_up(self, tokens: int) -> Decision:  # noqa: ARG002 - the same for all
        return SAFE_DECISION


class ServiceBook(PlanBook):
    """Plans of a service. Equal on all ranks, but that the first one may report.

    Args:
        is_complete: False where a plan is missing that was asked for: layers without one then
            run the safe plan without another warning.
        reports: on the rank that reports.
    """

    def __init__(
        self, plans: Iterable[Plan], *, is_complete: bool = True, reports: Reports | None = None
    ) -> None:
        super().__init__(plans)
        self._is_complete = is_complete
        self._reports = reports
        self._reporting: list[ReportingLayerPlans] = []

    def __deepcopy__(self, _: object) -> "ServiceBook":
        return self

    def __reduce__(self) -> tuple[type[PlanBook], tuple[tuple[Plan, ...]]]:
        return PlanBook, (self.plans,)

    def shelf(
        self,
        layer: LayerShape,
        *,
        expert_parallel: ExpertParallel = "all_to_all",
        sequence_parallel: bool = False,
        num_ranks: int,
        dtype: str,
        memory_reuse: Strategy | None = None,
    ) -> LayerPlans | None:
        """Return the plans for a layer, None where there is none and none was asked for in vain."""
        plans = self.plans_for(
            layer, expert_parallel=expert_parallel, sequence_parallel=sequence_parallel,
            num_ranks=num_ranks, dtype=dtype,
        )  # fmt: skip
        if not plans:
            return None if self._is_complete else SafeLayerPlans()
        if self._reports is None:
            return LayerPlans(plans)
        shelf = ReportingLayerPlans(plans, self._reports, memory_reuse)
        self._reporting.append(shelf)
        return shelf

    def close(self) -> None:
        """Report the last calls and send what waits, for two seconds at most."""
        if self._reports is not None:
            for shelf in self._reporting:
                shelf.report()
            self._reports.sender.close()


def share_found(
    find: Callable[[], FoundPlans], *, group: dist.ProcessGroup | None = None
) -> ServiceBook:
    """Return the same book on every rank: the group's first rank finds, all others receive.

    Args:
        find: called on the group's first rank only.

    Raises:
        MoetuneError: what `find` raised, on every rank.
        RankMismatchError: a rank received something else.
    """
    council = Council(group)
    own: list[FoundPlans] = []

    def say() -> tuple[list[str], bool]:
        try:
            own.append(find())
        except MoetuneError:
            raise
        except Exception as error:
            # Any other error would be this rank's alone, and the others would wait for it.
            raise MoetuneError(f"plans cannot be loaded: {error!r}") from error
        return [canonical_json(plan) for plan in own[0].plans], own[0].is_complete

    texts, is_complete = council.hear(say)
    book = ServiceBook(
        (plan_from_json(text, "plan from the first rank") for text in texts),
        is_complete=is_complete,
        reports=own[0].reports if own else None,
    )
    council.compare(book.digest, "plan books")
    return book


def _observation(plan: Plan, seconds: float) -> Observation:
    """Return what a call took beside what the plan said: its pipelined part, both phases."""
    return Observation(
        plan_id=plan.id,
        forward_degree=plan.pipeline.forward_degree,
        backward_degree=plan.pipeline.backward_degree,
        tokens_per_rank=plan.workload.tokens_per_rank,
        predicted_seconds=plan.predicted.forward_seconds + plan.predicted.backward_seconds,
        seconds=(seconds,),
        source="training",
    )
