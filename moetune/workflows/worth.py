"""Points worth measuring for a plan, and what knowing them is expected to change.

`moetune profile --for PLAN` measures them. Operations are ranked by how much surer the plan would
be if they were known; of each, the sizes are measured that the plan's own choice needs, and then
those of the choices that it is compared with.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from moetune.domain.costs import Costs
from moetune.domain.errors import InputError
from moetune.domain.model_plan import Confidence
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.samples import CollectivePoint, Point
from moetune.fit.wanted import Wanted, wanted_by
from moetune.measure.grid import IN_FLIGHT, collective
from moetune.measure.points import that_fit
from moetune.measure.schedule import family
from moetune.solve.layer.information import Judge, Worth, expected_gain
from moetune.solve.layer.plan import judge_ranked
from moetune.solve.layer.times import StepTime, step_time
from moetune.solve.layout.choose import choose_layout
from moetune.solve.layout.uncertainty import NUM_CONTENDERS, timed_under
from moetune.workflows.plan import drawn_costs, layout_problem, solve_layer

NUM_SIZES = 3
"""Most sizes of one operation that are measured: the plan's own, and its nearest rivals'."""
ROUGH_OF_LAYERS, ROUGH_OF_MODELS = 40, 20
"""Refits that operations are ranked under: each takes long, most of all for a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorthyOperations:
    """Operations that share one error, and what knowing them would do for the plan.

    Args:
        operations: in words.
        regret_saved, range_saved: as of `Worth`.
        points: to measure.
    """

    operations: tuple[str, ...]
    regret_saved: float
    range_saved: float
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWorth:
    """Measurements that would make a plan surer, by their worth.

    Args:
        before, after: confidence in the plan as it is, and expected once everything here is known;
            of a whole model in its layout.
        groups: the most valuable first; empty where nothing is worth measuring.
        out_of_reach: operations that need more ranks than the profile has.
    """

    before: Confidence
    after: Confidence
    groups: tuple[WorthyOperations, ...]
    out_of_reach: tuple[str, ...]

    @property
    def points(self) -> tuple[Point, ...]:
        """All points, each once."""
        return tuple(dict.fromkeys(point for group in self.groups for point in group.points))


def find_worth(plan: Plan, *, profile: Profile) -> PlanWorth:
    """Return what is worth measuring for the plan.

    Args:
        profile: the one that the plan was made with.

    Raises:
        InputError: the profile was not measured.
        InfeasiblePlanError, ProfileError: the plan can no longer be made.
    """
    if profile.provenance != "measured":
        raise InputError(
            f"plan {plan.id[:6]} was made with the {profile.provenance} profile "
            f"{profile.name!r}: nothing of it can be measured",
            "measure your machine with `moetune profile`, and plan with that profile",
        )
    question = (_of_layer if plan.transformer is None else _of_model)(plan, profile)
    allowed = plan.inputs.pinned.allow_modelled
    wanted = dict.fromkeys(
        one for ask in question.choices for one in wanted_by(ask, profile, allow_modelled=allowed)
    )
    near = [one for one in wanted if _num_ranks(one.point) <= profile.machine.num_devices]
    points = _points_by_family(near, profile)
    gain = expected_gain(question.judge, points, rough=question.rough)
    far = dict.fromkeys(one.operation for one in wanted if one not in near)
    return PlanWorth(
        before=gain.before,
        after=gain.after,
        groups=tuple(_group(worth, near, points[worth.family]) for worth in gain.worths),
        out_of_reach=tuple(far),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """A plan's decision.

    Args:
        choices: what computes each choice that is compared, the plan's own first.
        judge, rough: confidence in it, under all refits and under enough to rank operations.
    """

    choices: Sequence[Callable[[Costs], object]]
    judge: Judge
    rough: Judge


def _of_layer(plan: Plan, profile: Profile) -> _Question:
    ranked = solve_layer(plan.inputs, profile).ranked
    assert ranked is not None  # noqa: S101 - the plan is one of a layer
    best = ranked.best
    declined = [] if ranked.declined is None else [ranked.declined.step]
    rivals = sorted([*best.others(), *ranked.rivals], key=lambda step: step.seconds)

    def ask(step: StepTime) -> Callable[[Costs], object]:
        forward, backward = step.degrees
        return lambda costs: step_time(
            costs=replace(best.costs, costs=costs), tokens=best.tokens, forward_degree=forward,
            backward_degree=backward, order=best.order, strategy=step.strategy,
        )  # fmt: skip

    def judge(known: frozenset[str], num: int | None = None) -> Confidence:
        return judge_ranked(ranked, _drawn(plan, profile, known)[:num])

    choices = [ask(step) for step in (ranked.step, *declined, *rivals)]
    return _Question(choices=choices, judge=judge, rough=partial(judge, num=ROUGH_OF_LAYERS))


def _of_model(plan: Plan, profile: Profile) -> _Question:
    model = plan.inputs.request.whole
    assert model is not None  # noqa: S101 - the plan is one of a whole model
    chosen = choose_layout(layout_problem(plan.inputs, model, profile))

    def judge(known: frozenset[str], num: int | None = None) -> Confidence:
        return chosen.judge(_drawn(plan, profile, known)[:num])

    return _Question(
        choices=[
            partial(timed_under, chosen.search, candidate)
            for candidate in chosen.found.best[: NUM_CONTENDERS + 1]
        ],
        judge=judge,
        rough=partial(judge, num=ROUGH_OF_MODELS),
    )


def _drawn(plan: Plan, profile: Profile, known: frozenset[str]) -> tuple[Costs, ...]:
    allowed = plan.inputs.pinned.allow_modelled
    return drawn_costs(profile, allow_modelled=allowed, known=known)


def _num_ranks(point: Point) -> int:
    return point.group_size if isinstance(point, CollectivePoint) else 1


def _points_by_family(wanted: Iterable[Wanted], profile: Profile) -> dict[str, tuple[Point, ...]]:
    """Return each family's points, of every operation the first few sizes."""
    sizes: dict[tuple[str, object], dict[Point, None]] = {}
    for one in wanted:
        point = _measured_as(one.point)
        sizes.setdefault((one.family, family(point)), {})[point] = None
    found: dict[str, list[Point]] = {}
    for (name, _), points in sizes.items():
        found.setdefault(name, []).extend(islice(points, NUM_SIZES))
    fitting = {name: that_fit(points, profile.machine) for name, points in found.items()}
    return {name: points for name, points in fitting.items() if points}


def _measured_as(point: Point) -> Point:
    """Return the point as sessions measure it: several collectives stand for all numbers."""
    if not isinstance(point, CollectivePoint):
        return point
    in_flight = 1 if point.in_flight == 1 else IN_FLIGHT
    return collective(point.op, point.group, point.num_bytes, in_flight)


def _group(worth: Worth, wanted: Iterable[Wanted], points: tuple[Point, ...]) -> WorthyOperations:
    mine = dict.fromkeys(one.operation for one in wanted if one.family == worth.family)
    return WorthyOperations(
        operations=tuple(mine),
        regret_saved=worth.regret_saved,
        range_saved=worth.range_saved,
        points=points,
    )
