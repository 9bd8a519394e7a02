"""The predicted peak against a naive recount of tensors."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.constraints import STRATEGIES, Strategy
from moetune.domain.layer import LayerShape, Workload
from moetune.solve.layer.peak import peak_bytes

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
        wide: list[str] = ["hidden"]
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
        found["activation_bytes"] += one_dispatched + one_middle
        mixes = workload.local_experts > 1 or any(
            has_inner_cut(*pair) for pair in (degrees, degrees[::-1])
        )
        wire = [] if workload.world_size == 1 else ["rows", "by source"] if mixes else ["rows"]
        found["buffer_bytes"] += one_dispatched * len(["received", *wire])
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
