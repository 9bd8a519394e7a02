"""Draws of a profile's costs as one, against each of them by itself."""

import numpy as np
import pytest

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.domain.cost_keys import AttentionKey, CollectiveKey, CopyKey, GemmKey, RowsKey
from moetune.domain.costs import Costs, Estimate, Number, seconds_if_known
from moetune.domain.profile import Profile
from moetune.domain.samples import GemmForm
from moetune.fit.variants import resample_costs
from tests.report.lab import lab_profile

NUM = 7
PROFILES = {
    "samples": lab_profile(),
    "tables": load_profile_file(bundled_profiles()["a100-x4"]),
    "lines": load_profile_file(bundled_profiles()["rtx2080ti-x64"]),
    "rules": load_profile_file(bundled_profiles()["h100-x8"]),
}
FORMS: tuple[GemmForm, ...] = ("forward", "grad_input", "grad_weight")
SIZES = [0.5, 1.0, 16.0, 37.5, 256.0, 1000.0, 4096.0, 2.0**15, 2.0**21, 1e9]


def predicted(costs: Costs, profile: Profile, size: Number) -> list[Estimate[Number] | None]:
    """Return some of every kind of operation, as measured and as stood in for."""
    dtype = "bfloat16" if profile.tables or profile is PROFILES["tables"] else "float32"
    group = {id(PROFILES["tables"]): 4, id(PROFILES["rules"]): 64}.get(id(profile), 8)
    estimates: list[Estimate[Number] | None] = [
        costs.seconds(GemmKey(dtype, form, 2, d_in, 2048), size)
        for form in FORMS
        for d_in in (512, 8, 700)
    ]
    estimates += [
        costs.seconds(CollectiveKey("all_to_all", group, in_flight=in_flight), size)
        for in_flight in (1, 2, 7)
    ]
    estimates += [
        seconds_if_known(costs, RowsKey(op, dtype), size * 512)
        for op in ("gelu", "gelu_backward", "silu", "gather", "gate")
    ]
    if costs.copy_mode is not None:
        estimates.append(costs.seconds(CopyKey("d2h", pinned=True), size))
    estimates.append(seconds_if_known(costs, AttentionKey(dtype, 512, 8, 64), size))
    return estimates


@pytest.mark.parametrize("name", PROFILES)
def test_draws_together_have_the_times_of_each(name: str) -> None:
    profile = PROFILES[name]
    every = resample_costs(profile, num=NUM, seed=0, allow_modelled=True)
    for refits in (every, every[2:5], every[::-3]):
        costs = refits[0].together(refits)
        for size in SIZES:
            each = [predicted(refit, profile, size) for refit in refits]
            for at, estimate in enumerate(predicted(costs, profile, np.array([size]))):
                alone = [estimates[at] for estimates in each]
                if estimate is None:
                    assert alone == [None] * len(refits)
                    continue
                seconds = [draw.seconds for draw in alone if draw is not None]
                assert np.broadcast_to(estimate.seconds, len(refits)).tolist() == pytest.approx(
                    seconds, rel=1e-12
                )


def test_draws_of_several_profiles_do_not_go_together() -> None:
    first, second = (
        resample_costs(PROFILES["samples"], num=2, seed=seed, allow_modelled=False)
        for seed in (0, 1)
    )
    with pytest.raises(TypeError, match="different profiles"):
        first[0].together([first[0], second[1]])
