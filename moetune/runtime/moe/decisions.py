"""Decide a step's degree and strategy: the layer's arguments come first, then the plan.

`ExpertLayer.forward` decides after the ranks agree on their tokens, and before the gate runs.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from moetune.comm.agree import agree, few_values
from moetune.comm.group import Communicator
from moetune.domain.constraints import STRATEGIES, Strategy
from moetune.domain.document import digest
from moetune.domain.errors import InputError
from moetune.domain.kernels import ExpertKernel
from moetune.domain.layer import LayerKey
from moetune.domain.placement import check_order
from moetune.domain.plan import Decision, Plan
from moetune.domain.withdrawn import common_degree
from moetune.runtime.moe.dispatcher import check_dispatcher
from moetune.runtime.moe.expert_kernels import check_kernel, kernel_problem
from moetune.runtime.plans.book import GivenPlan, PlanBook, plans_of, warn_on_first
from moetune.runtime.plans.layer_plans import LayerPlans
from moetune.runtime.plans.timers import Watch

_SHOWN_EXPERTS = 8


class LayerDecisions:
    """The decisions of one layer; they are equal on all ranks if arguments and plan books are.

    Args:
        key: key of the layer; the step's dtype replaces the key's.
        rank: this rank's index in the layer's group; rank 0 logs warnings.
        pipeline, memory_reuse, plan, placement, expert_kernel, dispatcher: as in `MoELayer`.
        can_place: whether the layer supports another order of experts than the natural order.

    Attributes:
        placement: the expert of each place; empty for the natural order.
        has_met: the ranks have compared their plans and layers; a layer's shape sets an exchange's
            size.

    Raises:
        InputError: an argument is out of range.
    """

    has_met = False
    _problem: InputError | None = None
    """The reason why this rank cannot use its plan, raised when the ranks meet in `agree`."""

    def __init__(
        self,
        key: LayerKey,
        *,
        rank: int,
        pipeline: bool | int,
        memory_reuse: bool | str,
        plan: GivenPlan,
        placement: Sequence[int] | None = None,
        can_place: bool = True,
        expert_kernel: ExpertKernel | None = None,
        dispatcher: str | None = None,
    ) -> None:
        self._key, self._rank, self._kernel = key, rank, expert_kernel
        self._pinned = _pinned_decision(pipeline)
        self._strategy = forced_strategy(memory_reuse)
        self.placement: tuple[int, ...] = ()
        self._book = PlanBook()
        try:
            check_kernel(expert_kernel)
            check_dispatcher(dispatcher, key.expert_parallel)
            self._book = _book(plan, key)
            placed = _placement(placement, self._book, key)
            self.placement = () if placed == tuple(range(key.layer.num_experts)) else placed
            if self.placement and not can_place:
                raise InputError(  # noqa: TRY301 - raised on all ranks as the others
                    "the plan places experts on other ranks, and this model's stay in their "
                    "natural order",
                    "plan with --expert-placement natural",
                )
        except InputError as error:
            self._problem = error
        self._plans: dict[torch.dtype, LayerPlans] = {}
        self._kernel_problems: dict[tuple[object, ...], str] = {}

    @property
    def version(self) -> str:
        """A text that is equal on ranks with equal decisions."""
        source = self._book.version if self._pinned is None else str(self._pinned)
        kernel = f", kernel {self._kernel}" if self._kernel else ""
        return f"plan {source}, memory {self._strategy or 'as planned'}{kernel}"

    def check(self) -> None:
        """Raise InputError if this rank cannot use its plan, such as a plan for another layer."""
        if self._problem is not None:
            raise self._problem

    def agree(self, communicator: Communicator, seed: int) -> int:
        """Return the first rank's seed, once all ranks have the same layer and plans.

        Raises:
            InputError, RankMismatchError: as in `PlannedLayer.agree_on_plans`.
        """
        agree(communicator, self.check, lambda _: (self._described,), "the layer and its plans")
        self.has_met = True
        mine = few_values((seed,), communicator.device)
        seeds = communicator.all_gather_values(mine, "the exchange of the experts' seed")
        return int(seeds[0])

    @property
    def _described(self) -> str:
        """A short description of the book, the layer and the experts' places."""
        described = f"{self._book.described} for {self._key.layer}"
        if not self.placement:
            return described
        return f"{described}, experts in the order {_shortened(self.placement)}"

    def pin(self, decision: Decision | None) -> None:
        """Make `decide` return `decision` from now on; None goes back to the plan."""
        if decision is not None:
            _ = decision.degree
        self._pinned = decision

    def decide(self, num_tokens: int, dtype: torch.dtype) -> Decision:
        """Return the decision for the group's agreed number of tokens."""
        decision = self._pinned
        if decision is None:
            decision = self._plans_for(dtype).decide(num_tokens)
        if self._strategy is not None:
            decision = replace(decision, strategy=self._strategy)
        if self._kernel is not None:
            decision = replace(decision, kernel=self._kernel)
        return decision

    def expected_degree(self, num_tokens: int, dtype: torch.dtype) -> int:
        """Return the degree for this rank's tokens; 1 if no plan has been looked up yet.

        This raises no error: the ranks have not agreed yet, and the other ranks would wait.
        """
        if self._pinned is None and dtype not in self._plans:
            return 1
        return self.decide(num_tokens, dtype).forward_degree

    def kernel_problem(self, dtype: torch.dtype, device: torch.device) -> str:
        """Return why this rank lacks a kernel for its steps in that dtype; "" if it lacks none."""
        forced = self._kernel or (None if self._pinned is None else self._pinned.kernel)
        wanted = dtype, device.type, forced
        if wanted not in self._kernel_problems:
            layer, key = self._key.layer, replace(self._key, dtype=dtype_name(dtype))
            names = [plan.kernel.name for plan in self._book.plans_for(key) if plan.kernel]
            widths = layer.d_model, layer.d_hidden
            problems = (
                kernel_problem(name, device=device, dtype=dtype, widths=widths)
                for name in ([forced] if forced else names)
            )
            self._kernel_problems[wanted] = next(filter(None, problems), "")
        return self._kernel_problems[wanted]

    def watch(self, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Watch:
        """Return a timer for this call, for a search that needs measured steps."""
        plans = self._plans.get(dtype)
        if self._pinned is not None or plans is None or not torch.is_grad_enabled():
            return Watch()
        return plans.watch(num_tokens, device)

    def _plans_for(self, dtype: torch.dtype) -> LayerPlans:
        if dtype not in self._plans:
            key = replace(self._key, dtype=dtype_name(dtype))
            for plan in self._book.plans_for(key):
                _check_degrees(plan)
            plans = self._book.layer_plans(
                key, memory_reuse=self._strategy, watches=self._rank == 0
            )
            if not plans.plans and self._book.is_complete:
                warn_on_first(
                    f"no plan for {key.layer} in {key.dtype} on {key.num_ranks} ranks: "
                    f"running one chunk. Make a plan with `moetune plan`.",
                    rank=self._rank,
                )
            self._plans[dtype] = plans
        return self._plans[dtype]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that plans use for a dtype."""
    return str(dtype).removeprefix("torch.")


def _pinned_decision(pipeline: bool | int) -> Decision | None:
    """Return the caller's degree, None for the plan's; raise InputError for a degree below 1."""
    if pipeline is True:
        return None
    degree: object = 1 if pipeline is False else pipeline
    if not isinstance(degree, int) or degree < 1:
        raise InputError(
            f"pipeline must be True, False or a degree of at least 1, got {pipeline!r}",
            "False is one chunk",
        )
    return Decision(forward_degree=degree, backward_degree=degree)


def forced_strategy(memory_reuse: bool | str) -> Strategy | None:
    """Return the caller's strategy, None for the plan's; raise InputError for an unknown name."""
    if memory_reuse is True:
        return None
    wanted = memory_reuse or "none"
    for strategy in STRATEGIES:
        if strategy == wanted:
            return strategy
    raise InputError(
        f"memory_reuse {memory_reuse!r} is not available",
        f"use True, False or one of {', '.join(STRATEGIES)}",
    )


def _book(plan: GivenPlan, key: LayerKey) -> PlanBook:
    """Return the book to look plans up in; raise InputError if a plan is for another layer."""
    if plan is None or isinstance(plan, PlanBook):
        return plan or PlanBook()
    plans = plans_of(plan)
    for candidate in plans:
        _check_plan(candidate, key)
    return PlanBook(plans)


def _placement(given: Sequence[int] | None, book: PlanBook, key: LayerKey) -> tuple[int, ...]:
    """Return the expert of each place: the given order, or that of all plans for the layer.

    Plans made without loads of experts have no placement, and fit any. Raises InputError if the
    placement is no permutation, or two plans differ.
    """
    num_experts = key.layer.num_experts
    if given is not None:
        check_order(given, num_experts)
        return tuple(given)
    natural = tuple(range(num_experts))
    by_order: dict[tuple[int, ...], Plan] = {}
    for plan in book.plans:
        of_layer = replace(plan.workload.key, dtype=key.dtype) == key
        if of_layer and plan.placement is not None:
            by_order.setdefault(plan.experts or natural, plan)
    if len(by_order) > 1:
        first, second, *_ = (plan.id[:6] for plan in by_order.values())
        raise InputError(
            f"plans {first} and {second} place the experts of {key.layer} differently",
            "keep the plans of one routing, or give the layer its placement",
        )
    return next(iter(by_order), ())


def _shortened(placement: tuple[int, ...]) -> str:
    """Return a placement's first experts and its digest as text; it differs for other orders."""
    first = ", ".join(map(str, placement[:_SHOWN_EXPERTS]))
    return f"{first}, … ({digest(placement)[:12]})"


def _check_degrees(plan: Plan) -> None:
    """Raise InputError if a range of the plan has different degrees forward and backward."""
    pipeline = plan.pipeline
    common_degree(pipeline.forward_degree, pipeline.backward_degree)
    for _, _, forward, backward in pipeline.ranges:
        common_degree(forward, backward)


def _check_plan(plan: Plan, wanted: LayerKey) -> None:
    _check_degrees(plan)
    planned = plan.workload.key
    if (planned.layer, planned.num_ranks) != (wanted.layer, wanted.num_ranks):
        raise InputError(
            f"plan {plan.id[:6]} is for {planned.layer} on {planned.num_ranks} ranks, "
            f"the layer is {wanted.layer} on {wanted.num_ranks}",
            "make a plan for this layer with `moetune plan`",
        )
    if planned.expert_parallel != wanted.expert_parallel:
        raise InputError(
            f"plan {plan.id[:6]} is for experts shared by {planned.expert_parallel}, "
            f"this layer shares them by {wanted.expert_parallel}",
            f"make a plan with `moetune plan --expert-parallel {wanted.expert_parallel}`",
        )
