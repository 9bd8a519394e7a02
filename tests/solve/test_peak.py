"""The predicted peak against a naive recount of tensors."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.constraints import STRATEGIES, Strategy
from moetune.domain.layer import LayerShape, Workload
from moetune.solve.layer.memory import layer_memory, total_bytes
from moetune.solve.layer.peak import Peak, StateBytes, peak_bytes

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


def most_rows(tokens: int, degree: int, top_k: int) -> int:
    """Return the largest chunk's rows by dealing tokens out as the runtime cuts them."""
    bounds = [tokens * chunk // degree for chunk in range(degree + 1)]
    return max(high - low for low, high in itertools.pairwise(bounds)) * top_k


def has_inner_cut(own: int, other: int) -> bool:
    """Whether one of the other phase's cuts lies within a chunk of this phase."""
    return any((own * cut) % other for cut in range(other))


def recounted_rings(
    workload: Workload, degrees: tuple[int, int], strategy: Strategy
) -> dict[str, int]:
    """Return the bytes of every chunk-sized tensor of the two phases, the larger of them."""
    layer, size = workload.layer, BYTES[workload.dtype]
    phases = []
    for phase, (own, other) in (("forward", degrees), ("backward", degrees[::-1])):
        rows = most_rows(workload.tokens_per_rank, own, layer.top_k)
        wide: list[str] = [] if layer.activation == "relu" else ["hidden"]
        wide += ["grad hidden"] if phase == "backward" else []
        narrow: list[str] = []
        if strategy != "none":
            wide += ["pre", "gate"] if layer.activation == "swiglu" else ["pre"]
            sent = ["rows", "x again"] if phase == "backward" and strategy in "S2 S4" else ["rows"]
            narrow += [*sent, *(["results"] if own > 1 else [])]
            narrow += ["rows of the chunk behind"] if phase == "forward" and own > 2 else []
            narrow += ["arriving", "at the experts"][:own] * 2
            narrow += ["leaving"] if phase == "backward" and own > 2 else []
            mixes = workload.local_experts > 1 or has_inner_cut(own, other)
            narrow += ["by expert"] if workload.world_size > 1 and mixes else []
        phases.append(rows * size * (len(wide) * layer.d_hidden + len(narrow) * layer.d_model))
    return {"ring_bytes": max(phases)}


def recounted(workload: Workload, degrees: tuple[int, int], strategy: Strategy) -> dict[str, int]:
    layer, size = workload.layer, BYTES[workload.dtype]
    tokens, rows = workload.tokens_per_rank, workload.tokens_per_rank * layer.top_k
    middle = layer.d_hidden * (2 if layer.activation == "swiglu" else 1)
    one_x = tokens * layer.d_model * size
    one_dispatched, one_middle = rows * layer.d_model * size, rows * middle * size
    found = recounted_rings(workload, degrees, strategy)
    found |= {"activation_bytes": one_x + one_x, "buffer_bytes": one_x + one_x, "host_bytes": 0}
    if strategy == "none":
        found["activation_bytes"] += one_dispatched + one_middle + one_dispatched
        mixes = workload.local_experts > 1 or any(
            has_inner_cut(*pair) for pair in (degrees, degrees[::-1])
        )
        found["buffer_bytes"] += one_dispatched * (3 if workload.world_size > 1 and mixes else 2)
    if strategy in {"S1", "S3"}:
        found["host_bytes"] += one_dispatched
    if strategy in {"S1", "S2"}:
        found["host_bytes"] += one_middle
    return found


workloads = st.builds(
    Workload,
    layer=st.builds(
        LayerShape,
        d_model=st.integers(1, 64),
        d_hidden=st.integers(1, 200),
        num_experts=st.sampled_from([4, 8]),
        top_k=st.integers(1, 4),
        activation=st.sampled_from(["relu", "gelu", "silu", "swiglu"]),
    ),
    world_size=st.sampled_from([1, 2, 4]),
    tokens_per_rank=st.integers(8, 5000),
    dtype=st.sampled_from(["float32", "float64"]),
)


@settings(deadline=None, max_examples=200)
@given(
    workload=workloads,
    degrees=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    strategy=st.sampled_from(STRATEGIES),
)
def test_every_part_is_the_sum_of_its_tensors(
    workload: Workload, degrees: tuple[int, int], strategy: Strategy
) -> None:
    peak = peak_bytes(
        workload=workload, forward_degree=degrees[0], backward_degree=degrees[1],
        strategy=strategy,
    )  # fmt: skip
    runs = strategy if max(degrees) > 1 else "none"
    for name, wanted in recounted(workload, degrees, runs).items():
        assert getattr(peak, name) == wanted, name
    parts = (
        peak.state_bytes, peak.activation_bytes, peak.buffer_bytes, peak.ring_bytes,
        peak.routing_bytes,
    )  # fmt: skip
    assert sum(parts) == peak.device_bytes


def peak_of(workload: Workload, **options: Any) -> Peak:
    return peak_bytes(
        workload=workload, forward_degree=4, backward_degree=4, strategy="S4", **options
    )


GPT_XL = Workload(
    layer=LayerShape(d_model=2048, d_hidden=8192, num_experts=64, activation="relu"),
    world_size=64,
    tokens_per_rank=16384,
)


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("strategy", ["S1", "S2", "S3", "S4"])
def test_rings_need_no_more_than_the_papers_formula(degree: int, strategy: Strategy) -> None:
    shape: dict[str, Any] = {
        "workload": GPT_XL, "forward_degree": degree, "backward_degree": degree,
        "strategy": strategy,
    }  # fmt: skip
    peak = peak_bytes(**shape, bias=False)
    bound = total_bytes(layer_memory(**shape))
    assert peak.device_bytes - peak.routing_bytes <= bound
    assert peak.routing_bytes <= 0.01 * bound


@pytest.mark.parametrize(
    ("states", "per_parameter"),
    [
        (StateBytes.adam("float32"), 16),
        (StateBytes.adam("bfloat16"), 8),
        (StateBytes.of_layer("bfloat16"), 16),
        (StateBytes(parameter=4, gradient=4, optimizer=0), 8),
    ],
)
def test_states_are_those_that_the_optimiser_keeps(states: StateBytes, per_parameter: int) -> None:
    parameters = 64 * 2048 + 2 * 2048 * 8192
    assert peak_of(GPT_XL, bias=False, states=states).state_bytes == per_parameter * parameters
    assert peak_of(GPT_XL, states=states).state_bytes == per_parameter * (parameters + 2048 + 8192)


def test_two_byte_gradients_are_summed_in_four_bytes() -> None:
    narrow = replace(GPT_XL, dtype="bfloat16")
    two, four = (
        peak_of(narrow, bias=False, states=states)
        for states in (
            StateBytes.of_layer("bfloat16"),
            StateBytes(parameter=2, gradient=4, optimizer=12),
        )
    )
    assert two.buffer_bytes - four.buffer_bytes == 2 * (2 * 2048 * 8192)
