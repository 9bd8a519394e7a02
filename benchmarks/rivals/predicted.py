"""Plans of ours for the case, from the lab's own profile, and what they are predicted to take."""

from dataclasses import dataclass, replace

from benchmarks.rivals.case import Case
from moetune.domain.constraints import Constraints, LayoutPins, TransformerSizes
from moetune.domain.layout import Layout
from moetune.domain.profile import Profile
from moetune.domain.request import PlanRequest
from moetune.solve.layout.candidates import Batching, Candidate
from moetune.solve.layout.choose import LayoutProblem, search_layouts
from moetune.solve.layout.search import LayoutSearch
from moetune.workflows.plan import layout_problem

_NUM_RANKS = 2
_EXCHANGING = Layout(expert_parallel="all_to_all", dp=_NUM_RANKS, ep=_NUM_RANKS, tp=1, pp=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A way of ours.

    Args:
        variant: its chunks, forward/backward.
        predicted_seconds: of the step with its optimizer.
        is_plan: it is the plan.
    """

    variant: str
    predicted_seconds: float
    is_plan: bool

    @property
    def words(self) -> str:
        """What the table calls it."""
        chunks = "/".join(map(str, dict.fromkeys(degrees_of(self.variant))))
        return "one chunk" if chunks == "1" else f"{chunks} chunks"


def degrees_of(variant: str) -> tuple[int, int]:
    """Return the chunks of a way of ours, forward and backward."""
    forward, _, backward = variant.partition("/")
    return int(forward), int(backward)


def planned_ways(case: Case, profile: Profile) -> tuple[Planned, ...]:
    """Return the plan, and one chunk beside it."""
    search, _ = search_layouts(_problem(case, profile))
    plan = _timed(search, case)
    ways = {"{}/{}".format(*plan.priced.moe.step.degrees): plan}
    ways.setdefault("1/1", _timed(_pinned(search, (1, 1)), case))
    return tuple(
        Planned(variant=name, predicted_seconds=one.seconds, is_plan=one is plan)
        for name, one in ways.items()
    )


def _timed(search: LayoutSearch, case: Case) -> Candidate:
    whole = Batching(
        sequences=case.sequences, num_micro_batches=1, zero=False, recompute=False
    )  # fmt: skip
    return search.trial(_EXCHANGING).timed(whole)


def _pinned(search: LayoutSearch, degrees: tuple[int, int]) -> LayoutSearch:
    return replace(search, prices=search.prices.under(search.prices.costs, degrees=degrees))


def _problem(case: Case, profile: Profile) -> LayoutProblem:
    model = case.transformer
    exchanging = LayoutPins(dp=_NUM_RANKS, ep=_NUM_RANKS, tp=1, pp=1, zero=False)
    request = PlanRequest(
        layer=model.moe,
        constraints=Constraints(sizes=TransformerSizes.of(model), pins=exchanging),
        world_size=_NUM_RANKS,
        tokens_per_rank=case.sequences * model.length,
        dtype="float32",
    )
    return layout_problem(request.inputs_for(profile), model, profile)
