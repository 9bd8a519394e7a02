"""What to measure next: the operations whose uncertainty moves a choice."""

from collections.abc import Sequence

import numpy as np
import pytest

from moetune.domain.cluster import Fingerprint, Machine
from moetune.domain.constraints import Bounds
from moetune.domain.costs import Costs
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.plan import Confidence
from moetune.domain.profile import Profile
from moetune.domain.samples import CollectivePoint, GemmForm, GemmPoint, Point, Sample
from moetune.fit.costs import costs_of
from moetune.fit.profile import fit_profile
from moetune.fit.variants import resample_costs
from moetune.fit.wanted import wanted_by
from moetune.solve.layer.choose import DegreeChooser
from moetune.solve.layer.information import rank_by_worth
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.times import step_time
from moetune.solve.layer.uncertainty import judge_choice

TOKENS = 4096
WORKLOAD = Workload(
    layer=LayerShape(d_model=256, d_hidden=1024, num_experts=2), world_size=2,
    tokens_per_rank=TOKENS, dtype="float32",
)  # fmt: skip
FORMS: tuple[GemmForm, ...] = ("forward", "grad_input", "grad_weight")
IN_FLIGHT = 4


def profile() -> Profile:
    """GEMMs known at every size, exchanges alone, too; several in flight at two small ones."""
    points: dict[Point, float] = {}
    for rows in (2**at for at in range(13)):
        for d_in, d_out in ((256, 1024), (1024, 256)):
            for form in FORMS:
                point = GemmPoint(dtype="float32", product=form, rows=rows, d_in=d_in, d_out=d_out)
                points[point] = 1e-5 + 4e-11 * rows * d_in * d_out
    for size in (2**at for at in range(14, 24)):
        points[exchange(size, 1)] = 5e-4 + 2e-8 * size
    for size in (2**14, 2**15):
        points[exchange(size, IN_FLIGHT)] = 4e-4 + 1.8e-8 * size
    rng = np.random.default_rng(0)
    samples = [
        Sample(point=point, seconds=tuple(seconds * np.exp(0.003 * rng.normal(size=9))))
        for point, seconds in points.items()
    ]
    machine = Machine(
        kind="cpu", device="Lab CPU", num_devices=2, devices_per_node=2, memory_bytes=2**34
    )
    return fit_profile(name="lab", machine=machine, fingerprint=Fingerprint(), samples=samples)


def exchange(num_bytes: int, in_flight: int) -> CollectivePoint:
    return CollectivePoint(op="all_to_all", group_size=2, num_bytes=num_bytes, in_flight=in_flight)


@pytest.fixture(scope="module")
def measured() -> Profile:
    return profile()


def test_a_question_is_heard_with_its_operations_and_sizes(measured: Profile) -> None:
    def ask(costs: Costs) -> None:
        step_time(
            costs=layer_costs(workload=WORKLOAD, costs=costs), tokens=TOKENS, forward_degree=1,
            backward_degree=8,
        )  # fmt: skip

    found = {one.operation: one for one in wanted_by(ask, measured)}
    row_bytes = 256 * 4
    alone = found["all_to_all of 2 ranks"]
    several = found[f"all_to_all of 2 ranks, {IN_FLIGHT} in flight"]
    assert list(alone.sizes) == [TOKENS * row_bytes]
    assert list(several.sizes) == [TOKENS * row_bytes / 8]
    products = [one for name, one in found.items() if "GEMM" in name]
    assert {one.unit for one in products} == {"rows"}
    assert {one.sizes for one in products} == {(float(TOKENS),), (TOKENS / 8,)}


def test_the_operation_that_was_measured_worst_is_worth_most(measured: Profile) -> None:
    nominal = layer_costs(workload=WORKLOAD, costs=costs_of(measured))
    chooser = DegreeChooser(costs=nominal, bounds=Bounds())

    def judge(resamples: Sequence[Costs]) -> Confidence:
        return judge_choice(
            costs=nominal, resamples=resamples, tokens=TOKENS,
            forward=chooser.rank("forward", TOKENS), backward=chooser.rank("backward", TOKENS),
            order="dispatch_first",
        )  # fmt: skip

    wanted = wanted_by(lambda costs: judge((costs,)), measured)
    families = sorted({one.family for one in wanted})
    assert len(families) == 5
    resamples = resample_costs(measured, num=50, seed=0)
    knowing = {
        family: resample_costs(measured, num=50, seed=0, known=family) for family in families
    }
    ranked = rank_by_worth(judge, resamples, knowing)
    first = ranked[0]
    assert first.family == f"collective ('all_to_all', 2, 0, {IN_FLIGHT})"
    assert first.regret_saved > 0.4 * judge(resamples).expected_regret > 0.001
    assert first.range_saved > 0.4
    assert all(abs(one.regret_saved) < 0.1 * first.regret_saved for one in ranked[1:])


def test_a_stand_in_is_known_where_its_factor_is(measured: Profile) -> None:
    def times(known: str) -> set[float]:
        return {
            one.collective(op="all_to_all", group_size=4, num_bytes=2**20).seconds
            for one in resample_costs(measured, num=20, seed=0, allow_modelled=True, known=known)
        }

    (one,) = wanted_by(
        lambda costs: costs.collective(op="all_to_all", group_size=4, num_bytes=2**20),
        measured,
        allow_modelled=True,
    )
    spread = [max(found) / min(found) for found in (times(""), times(one.family))]
    assert one.operation == "all_to_all of 4 ranks"
    assert spread[0] > 2
    assert 1 < spread[1] < 1.1


def test_a_blend_that_is_known_is_the_nominal_one(measured: Profile) -> None:
    def seconds(costs: Costs) -> float:
        return costs.gemm(
            dtype="float32", product="forward", num_experts=1, rows=64, d_in=512, d_out=512
        ).seconds

    (one,) = wanted_by(seconds, measured)
    draws = resample_costs(measured, num=5, seed=0, known=one.family)
    assert {seconds(draw) for draw in draws} == {seconds(costs_of(measured))}


def test_without_a_range_nothing_is_saved_of_it() -> None:
    sure = Confidence(
        probability_best=1.0, expected_regret=0.0, p05_step_seconds=1.0, p95_step_seconds=1.0
    )
    (one,) = rank_by_worth(lambda _: sure, (), {"gemm": ()})
    assert (one.regret_saved, one.range_saved) == (0.0, 0.0)
