"""Scaled profiles against the costs of the profile that they were made from."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.domain.cost_keys import CollectiveKey, CopyKey, GemmKey, RowsKey
from moetune.domain.costs import Costs, seconds_if_known
from moetune.domain.errors import InputError
from moetune.domain.profile import Profile, RowsLine
from moetune.fit.costs import costs_of
from moetune.fit.speeds import Speeds, scale_profile
from tests.fit.measured import measured_profile

MEASURED = measured_profile()
PUBLISHED = load_profile_file(bundled_profiles()["rtx2080ti-x64"])
FACTORS = st.sampled_from([0.5, 2.0, 3.0, 1.7])


def times(profile: Profile) -> dict[str, tuple[float, ...]]:
    """Return times of operations by their part, measured and between measured sizes."""
    costs: Costs = costs_of(profile)
    ranks = 4 if profile.samples else 64
    computation = [
        costs.seconds(GemmKey("float32", form, experts, d_in, 2048), rows)
        for form in ("forward", "grad_weight")
        for experts, rows, d_in in ((1, 128, 512), (2, 300, 512), (4, 77, 1024))
    ]
    if profile.samples:
        gelu = seconds_if_known(costs, RowsKey("gelu", "float32"), 100 * 512)
        assert gelu is not None
        computation.append(gelu)
    communication = [
        costs.seconds(CollectiveKey("all_to_all", ranks, in_flight=several), size)
        for size in (2**14, 1e6, 1e9)
        for several in (1, 4)
    ]
    copies = [
        costs.seconds(CopyKey("h2d", pinned=True), size) for size in (2**14, 1e6) if profile.samples
    ]
    return {
        "computation": tuple(estimate.seconds for estimate in computation),
        "communication": tuple(estimate.seconds for estimate in communication),
        "copies": tuple(estimate.seconds for estimate in copies),
    }


@pytest.mark.parametrize("profile", [MEASURED, PUBLISHED], ids=["measured", "published"])
@settings(deadline=None, max_examples=15)
@given(computation=FACTORS, communication=FACTORS, copies=FACTORS)
def test_every_time_is_divided_by_the_speed_of_its_part(
    profile: Profile, computation: float, communication: float, copies: float
) -> None:
    speeds = Speeds(computation=computation, communication=communication, copies=copies)
    before, after = times(profile), times(scale_profile(profile, speeds))
    for part, seconds in before.items():
        expected = [time / getattr(speeds, part) for time in seconds]
        assert after[part] == pytest.approx(expected, rel=1e-6)


def test_how_operations_disturb_each_other_stays_as_measured() -> None:
    slower = scale_profile(MEASURED, Speeds(computation=0.3, communication=7.0, copies=1.9))
    before, after = costs_of(MEASURED), costs_of(slower)
    was, now = before.speeds["comm", "comp"], after.speeds["comm", "comp"]
    assert now == pytest.approx(was, rel=1e-12)
    assert after.speeds["comp", "comm"] < 1
    for size, seconds in ((2**16, 1e-4), (2**20, 5e-4)):
        then = before.overlap_speeds(exchange_bytes=size, exchange_seconds=seconds)
        later = after.overlap_speeds(exchange_bytes=size, exchange_seconds=seconds / 7.0)
        # By the samples of that size, which a table changed by rounding would overrule.
        assert later.comm == pytest.approx(then.comm, rel=1e-9)
        assert later.comp == pytest.approx(then.comp, rel=1e-9)


def test_a_scaled_profile_says_what_it_is() -> None:
    scaled = scale_profile(MEASURED, Speeds(communication=2.0, copies=0.5))
    assert scaled.provenance == "modelled"
    assert scaled.name == "lab with communication × 2, copies × 0.5"
    assert scaled.machine == MEASURED.machine
    assert scaled.digest != MEASURED.digest
    assert scale_profile(MEASURED, Speeds()) == MEASURED


def test_fits_keep_their_relative_errors_and_scale_their_intervals() -> None:
    scaled = scale_profile(MEASURED, Speeds(computation=4.0))
    before, after = MEASURED.gemm[0].error, scaled.gemm[0].error
    assert before is not None
    assert after is not None
    assert (after.median, after.p95, after.quality) == (before.median, before.p95, before.quality)
    assert after.beta_seconds == pytest.approx([beta / 4 for beta in before.beta_seconds])
    assert scaled.collective == MEASURED.collective


@pytest.mark.parametrize("factor", [0.0, -1.0, 1e-4, 1e4, math.inf, math.nan])
def test_a_speed_that_no_machine_has_is_refused(factor: float) -> None:
    with pytest.raises(InputError, match="communication"):
        Speeds(communication=factor)


def test_published_lines_of_memory_bound_operations_are_computation() -> None:
    line = RowsLine(op="gelu", dtype="float32", alpha_seconds=6e-6, beta_seconds_per_element=9e-12)
    published = replace(PUBLISHED, rows=(line,))
    speeds = Speeds(computation=3.0, communication=5.0, copies=7.0)
    estimate = seconds_if_known(
        costs_of(scale_profile(published, speeds)), RowsKey("gelu", "float32"), 1000 * 50
    )
    assert estimate is not None
    assert estimate.seconds == pytest.approx((6e-6 + 9e-12 * 50_000) / 3)
