"""The predicted peak against a naive recount of tensors."""

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.constraints import STRATEGIES, Strategy
from moetune.domain.layer import PHASES, LayerShape, Workload
from moetune.solve.layer.peak import peak_bytes

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


def most_rows(tokens: int, degree: int, top_k: int) -> int:
    """Return the largest chunk's rows by dealing tokens out as the runtime cuts them."""
    bounds = [tokens * chunk // degree for chunk in range(degree + 1)]
    return max(high - low for low, high in itertools.pairwise(bounds)) * top_k


def sent_rows(workload: Workload, rows: int) -> int:
    """Return the rows that travel for so many pairs: the mean over all choices of experts."""
    layer, local = workload.layer, workload.local_experts
    if workload.world_size == 1:
        return rows
    choices = [*itertools.combinations(range(layer.num_experts), layer.top_k)]
    reached = sum(len({expert // local for expert in chosen}) for chosen in choices)
    return math.ceil(round(rows * reached / len(choices) / layer.top_k, 6))


def recounted_rings(workload: Workload, degree: int, strategy: Strategy) -> dict[str, int]:
    """Return the bytes of every chunk-sized tensor of the two phases, the larger of them."""
    layer, size = workload.layer, BYTES[workload.dtype]
    phases = []
    rows = most_rows(workload.tokens_per_rank, degree, layer.top_k)
    is_mixed = workload.local_experts > 1 and workload.world_size > 1
    sends_again = strategy in "S2 S4"
    for phase in PHASES:
        is_backward = phase == "backward"
        wide: list[str] = ["hidden"]
        wide += ["grad hidden"] if is_backward else []
        of_experts: list[str] = []
        sent: list[str] = []
        if strategy != "none":
            wide += ["pre", "gate"] if layer.activation == "swiglu" else ["pre"]
            sent = (
                ["rows", "x again", "results"]
                if is_backward and sends_again
                else ["rows", "results"]
            )
            sent += ["rows of the chunk behind"] if not is_backward and degree > 2 else []
            sent += ["arriving"] * 2
            if is_mixed:
                of_experts = ["by expert", *["x"] * (is_backward * (1 if sends_again else 2))]
                sent += ["sums"] * 2 + ["x arriving"] * (2 * is_backward * sends_again)
            else:
                of_experts = ["at the experts"] * 2 + ["leaving"] * (is_backward and degree > 2)
        narrow = rows * len(of_experts) + sent_rows(workload, rows) * len(sent)
        if strategy != "none" and layer.top_k > 1:  # sums by token, before they are written
            narrow += most_rows(workload.tokens_per_rank, degree, 1)
        phases.append(size * (rows * len(wide) * layer.d_hidden + narrow * layer.d_model))
    return {"ring_bytes": max(phases)}


def recounted(workload: Workload, degree: int, strategy: Strategy) -> dict[str, int]:
    layer, size = workload.layer, BYTES[workload.dtype]
    tokens, rows = workload.tokens_per_rank, workload.tokens_per_rank * layer.top_k
    middle = layer.d_hidden * (2 if layer.activation == "swiglu" else 1)
    one_x = tokens * layer.d_model * size
    one_dispatched, one_middle = rows * layer.d_model * size, rows * middle * size
    memory = recounted_rings(workload, degree, strategy)
    memory |= {"activation_bytes": one_x + one_x, "buffer_bytes": one_x + one_x, "host_bytes": 0}
    if strategy == "none":
        memory["activation_bytes"] += one_dispatched + one_middle
        is_mixed = workload.local_experts > 1
        wire = (
            []
            if workload.world_size == 1
            else ["rows"] + ["by source", "sums"][: layer.top_k] * is_mixed
        )
        one_sent = sent_rows(workload, rows) * layer.d_model * size
        memory["buffer_bytes"] += one_dispatched + one_sent * len(wire)
    if strategy in {"S1", "S3"}:
        memory["host_bytes"] += one_dispatched
    if strategy in {"S1", "S2"}:
        memory["host_bytes"] += one_middle
    return memory


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
@given(workload=workloads, degree=st.integers(1, 8), strategy=st.sampled_from(STRATEGIES))
def test_every_part_is_the_sum_of_its_tensors(
    workload: Workload, degree: int, strategy: Strategy
) -> None:
    peak = peak_bytes(workload=workload, degree=degree, strategy=strategy, is_grouped=False)
    for name, wanted in recounted(workload, degree, strategy if degree > 1 else "none").items():
        assert getattr(peak, name) == wanted, name
    parts = (
        peak.state_bytes, peak.activation_bytes, peak.buffer_bytes, peak.ring_bytes,
        peak.routing_bytes,
    )  # fmt: skip
    assert sum(parts) == peak.device_bytes
