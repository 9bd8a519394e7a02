"""Plans for uneven routing: the fullest rank's rows decide times and memory."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.app.plan import check_layer, make_plan
from moetune.domain.document import encode
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.plan import Plan
from moetune.domain.question import Question
from moetune.domain.routing import LayerRouting
from moetune.solve.layer.peak import peak_bytes

PROFILE = load_profile_file(bundled_profiles()["rtx2080ti-x64"])
LAYER = LayerShape(d_model=1024, d_hidden=4096, num_experts=64, top_k=2)
DOUBLE = " ".join(["2"] + ["1"] * 62 + ["0"])
"""The first of 64 ranks, with one expert each, has twice the mean."""


def planned(routing: str = "", tokens: int = 4096, **options: Any) -> Plan:
    request = Question(
        **encode(LAYER), world_size=64, tokens=tokens, dtype="float16", routing=routing, **options
    )
    return make_plan(request, profile=PROFILE)


def test_phases_take_as_long_as_with_the_fullest_ranks_rows() -> None:
    skewed, full = planned(f"{DOUBLE} / 1"), planned(tokens=8192)
    assert skewed.predicted.forward_seconds == pytest.approx(full.predicted.forward_seconds)
    assert skewed.predicted.backward_seconds == pytest.approx(full.predicted.backward_seconds)
    assert skewed.pipeline.forward_degree == full.pipeline.forward_degree
    assert skewed.pipeline.backward_degree == full.pipeline.backward_degree
    assert skewed.id != planned().id
    assert skewed.inputs.pinned.routing == f"{DOUBLE} / 1"


def test_a_law_makes_the_step_longer_and_balanced_is_no_routing() -> None:
    assert planned("natural").predicted.step_seconds > 1.5 * planned().predicted.step_seconds
    assert str(LayerRouting.of("balanced")) == ""


def test_memory_has_room_for_one_step_in_a_hundred() -> None:
    workload = Workload(
        layer=LAYER, world_size=64, tokens_per_rank=4096, dtype="float16", routing=f"{DOUBLE} / 1.5"
    )
    twice = replace(workload, tokens_per_rank=3 * 4096, routing="")
    peak, most, even = (
        peak_bytes(workload=load, degree=2, is_grouped=False)
        for load in (workload, twice, replace(workload, routing=""))
    )
    assert workload.skew.p99 == pytest.approx(3)
    assert peak.ring_bytes == most.ring_bytes
    assert even.device_bytes < peak.device_bytes < most.device_bytes
    limit = (even.device_bytes + peak.device_bytes) // 2
    assert planned(memory_limit=limit).memory.strategy == "none"
    assert planned(f"{DOUBLE} / 1.5", memory_limit=limit).memory.strategy == "S4"


@given(
    loads=st.lists(st.floats(0, 1e6), min_size=4, max_size=16).filter(lambda some: sum(some) > 0),
    ranks=st.integers(1, 16),
    spread=st.floats(1, 3),
)
@settings(deadline=None)
def test_the_skew_is_the_fullest_block_of_neighbours(
    loads: list[float], ranks: int, spread: float
) -> None:
    loads = loads * ranks
    text = f"{' '.join(map(repr, loads))} / {spread!r}"
    routing = LayerRouting.of(text)
    assert LayerRouting.of(str(routing)) == LayerRouting.of(str(LayerRouting.of(str(routing))))
    skew = routing.skew(num_experts=len(loads), top_k=1, ranks=ranks)
    local = len(loads) // ranks
    blocks = [sum(loads[at : at + local]) for at in range(0, len(loads), local)]
    assert skew.mean == pytest.approx(max(blocks) * ranks / sum(loads), rel=1e-5)
    assert 1 - 1e-9 <= skew.mean <= skew.p99 <= ranks * (1 + 1e-9)


def test_routing_is_of_layers_with_all_to_alls() -> None:
    tensor = Question(**encode(LAYER), tokens=8, routing="natural", expert_parallel="tensor")
    with pytest.raises(InputError, match="excludes --expert-parallel tensor"):
        check_layer(tensor)
