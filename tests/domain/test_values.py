"""Values of the domain: what they refuse, and what they derive, worked out by hand."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.app.plan import check_layer
from moetune.app.profile_keys import in_si
from moetune.domain.cluster import Machine, process_bytes
from moetune.domain.document import encode
from moetune.domain.errors import InputError
from moetune.domain.interference import CompSpeed
from moetune.domain.layer import Activation, LayerShape, Workload
from moetune.domain.model import Transformer, read_shape
from moetune.domain.profile import CollectiveLine, CopyLine, GemmLine
from moetune.domain.question import Question
from moetune.domain.records import prediction_error
from moetune.domain.reference import CollectiveTable, DispatcherTable, Network, Rows
from moetune.domain.routing import ExpertLoads, LayerRouting
from moetune.domain.routing_record import routing_record
from moetune.domain.samples import AttentionPoint, CopyPoint, Sample, StepRecord
from moetune.domain.training import Degrees, FoldedLayout
from moetune.domain.units import parse_age, parse_bytes, parse_count

SHAPE = LayerShape(d_model=8, d_hidden=32, num_experts=4, top_k=2)


def machine(*, num_devices: int = 8, memory_bytes: int = 2**30) -> Machine:
    return Machine(kind="cpu", device="test", num_devices=num_devices, devices_per_node=4,
                   memory_bytes=memory_bytes)  # fmt: skip


def transformer(*, num_layers: int = 4, num_heads: int = 2, moe_every: int = 2) -> Transformer:
    return Transformer(moe=SHAPE, num_layers=num_layers, num_heads=num_heads, length=16,
                       vocab_size=50, moe_every=moe_every)  # fmt: skip


def spread_over(num_nodes: int) -> CollectiveLine:
    return CollectiveLine(
        op="send", group_size=2, num_nodes=num_nodes, alpha_seconds=1e-5, beta_seconds_per_byte=1e-9
    )


def gemm_line(alpha_seconds: float, beta_seconds: float) -> GemmLine:
    return GemmLine(dtype="float32", alpha_seconds=alpha_seconds, beta_seconds_per_mac=beta_seconds)


def table(
    *, points: Rows = ((1.0, 1.0),), group_size: int = 2, spread: float = 0.0
) -> CollectiveTable:
    return CollectiveTable(label="published", source="x", op="send", group_size=group_size,
                           points=points, spread=spread)  # fmt: skip


def dispatcher(*, num_sms: int) -> DispatcherTable:
    return DispatcherTable(label="published", source="x", dispatcher="deepep", phase="dispatch",
                           group_size=8, num_sms=num_sms, points=((1.0, 1.0),))  # fmt: skip


def step(*, degree: int = 1, seconds: float = 1.0) -> StepRecord:
    return StepRecord(
        workload=Workload(layer=SHAPE, world_size=2, tokens_per_rank=8), degree=degree,
        chunks_seconds=1.0, overhead_seconds=0.0, measured_seconds=seconds,
    )  # fmt: skip


def sample(*seconds: float, error: str = "", marks: tuple[str, ...] = ()) -> Sample:
    point = CopyPoint(direction="h2d", pinned=True, num_bytes=1)
    return Sample(point=point, seconds=seconds, error=error, marks=marks)


@pytest.mark.parametrize(("make", "what"), [
    (lambda: machine(num_devices=0), "num_devices must be at least 1, got 0"),
    (lambda: machine(memory_bytes=-1), "memory_bytes must be at least 1, got -1"),
    (lambda: CompSpeed(comm=0.0), "comm must be a speed above 0 and at most 1, got 0.0"),
    (lambda: CompSpeed(all=1.5), "all must be a speed above 0 and at most 1, got 1.5"),
    (lambda: LayerShape(d_model=8, d_hidden=8, num_experts=2, top_k=3), "top_k (3) is larger"),
    (lambda: Workload(layer=SHAPE, world_size=2, tokens_per_rank=0), "tokens_per_rank must be"),
    (lambda: transformer(num_layers=0), "num_layers must be at least 1, got 0"),
    (lambda: transformer(moe_every=-1), "moe_every must be at least 0, got -1"),
    (lambda: transformer(moe_every=5), "moe_every (5) is larger than num_layers (4)"),
    (lambda: transformer(num_layers=10**9), "num_layers must be from 1 to"),
    (lambda: transformer(moe_every=0), "moe_every is 0, but there are"),
    (lambda: spread_over(-1), "num_nodes must be at least 0, got -1"),
    (lambda: gemm_line(0.0, 0.0), "alpha and beta must be at least 0, and one of them"),
    (lambda: gemm_line(-1.0, 2.0), "alpha and beta must be at least 0, and one of them"),
    (lambda: sample(1.0, 0.0), "seconds must be positive and finite"),
    (lambda: sample(math.inf), "seconds must be positive and finite"),
    (sample, "seconds is empty and no error says why"),
    (lambda: table(points=()), "points is empty"),
    (lambda: table(points=((1.0, 2.0, 3.0),)), "a row of points must have 2 numbers, got 3"),
    (lambda: table(points=((1.0, 0.0),)), "sizes and seconds must be positive"),
    (lambda: table(group_size=1), "group_size must be at least 2, got 1"),
    (lambda: table(spread=2.0), "spread must be from 0 to 1, got 2.0"),
    (lambda: dispatcher(num_sms=-1), "group_size must be at least 2, and num_sms not negative"),
    (lambda: Network(source="x", nic_bytes_per_second=0.0), "nic_bytes_per_second must be"),
    (lambda: Network(source="x", nic_bytes_per_second=1.0, startup_seconds=-1.0), "a loss, a"),
    (lambda: step(degree=0), "degree must be at least 1, got 0"),
    (lambda: step(seconds=math.inf), "the times of a step must be positive and finite"),
    (lambda: LayerShape(d_model=8, d_hidden=True, num_experts=2), "d_hidden must be a whole"),
    (lambda: Degrees(forward=1, backward=0), "backward must be at least 1, got 0"),
    (lambda: FoldedLayout(ep=0), "ep must be at least 1, got 0"),
    (lambda: parse_count("1.3"), "count '1.3' is not a whole number"),
    (lambda: parse_bytes("9" * 400 + "GB"), "size '999"),
    (lambda: parse_age("3"), "duration '3' has no unit"),
    (lambda: LayerRouting.of("uneven"), "routing 'uneven' is neither balanced nor natural"),
    (lambda: LayerRouting.of("1 2 / 0.5"), "the spread of a routing must be 1 or more, got"),
    (lambda: ExpertLoads(name="f", loads=(1.0,) * 4).check(8), "routing f has the loads of 4"),
    (lambda: routing_record("{", "f"), "f is not valid JSON"),
    (lambda: in_si({"network": {"nics": 4}}, devices_per_node=8), "profile.network lacks the"),
    (lambda: in_si({"network": {"nics": 0, "nic_rate": "1GB/s"}}, devices_per_node=8),
     "profile.network.nics must be a whole number of at least 1, got 0"),
    (lambda: Question(model="gpt-s", nodes=2, world_size=16),
     "--nodes and --world-size both say how many ranks"),
    (lambda: Question(model="gpt-s", nodes=10**9), "--nodes must be from 1 to"),
])  # fmt: skip
def test_values_of_no_meaning_are_refused_by_name(make: Callable[[], object], what: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert caught.value.what.startswith(what)


def test_the_least_values_are_accepted() -> None:
    assert machine(num_devices=1, memory_bytes=1).num_devices == 1
    assert CompSpeed(comm=1e-9, all=1.0).all == 1.0
    assert LayerShape(d_model=1, d_hidden=1, num_experts=2, top_k=2).top_k == 2
    assert transformer(moe_every=4).num_moe_layers == 1
    assert gemm_line(0.0, 1e-12).cost.seconds(10) == pytest.approx(1e-11)
    assert gemm_line(1e-6, 0.0).cost.seconds(10) == 1e-6
    copied = CopyLine(direction="h2d", pinned=True, alpha_seconds=1e-6, beta_seconds_per_byte=1e-9)
    assert copied.cost.seconds(1000) == pytest.approx(2e-6)
    assert sample(error="out of memory").seconds == ()


@pytest.mark.parametrize("moe_every", [1, 2])
def test_a_model_is_named_by_its_sizes(moe_every: int) -> None:
    whole = transformer(moe_every=moe_every)
    assert read_shape(whole.text) == whole
    assert read_shape("ppmoe-6.7b") is None
    assert read_shape(f"{whole.text},more=1") is None


def test_an_unknown_activation_and_heads_that_do_not_divide_name_what_would_do() -> None:
    unknown: Activation = "tanh"  # type: ignore[assignment]  # what a stranger writes
    with pytest.raises(InputError, match="tanh") as caught:
        LayerShape(d_model=8, d_hidden=8, num_experts=2, activation=unknown)
    assert caught.value.hint == "use one of relu, gelu, silu, swiglu"
    with pytest.raises(
        InputError, match=r"d_model \(8\) does not divide by num_heads \(3\)"
    ) as odd:
        transformer(num_heads=3)
    assert odd.value.hint == "use 2 or 4 heads"


def test_a_ranks_work_is_that_of_its_tokens_and_their_choices() -> None:
    work = Workload(layer=SHAPE, world_size=2, tokens_per_rank=10, dtype="bfloat16")
    pairs = 10 * 2
    assert work.payload_bytes == pairs * 8 * 2
    assert work.macs == pairs * 8 * 32
    assert work.local_experts == 2


def test_attention_has_two_products_forward_and_five_backward_halved_by_the_mask() -> None:
    forward = AttentionPoint(dtype="float32", num_sequences=3, length=10, num_heads=2, head_dim=4)
    once = 3 * 2 * 10 * 10 * 4 / 2
    assert forward.macs == 2 * once
    assert replace(forward, backward=True).macs == 5 * once


def test_quality_follows_the_spread_of_four_blocks_and_any_mark_spoils_it() -> None:
    # Quartiles of 1, 1, 1 + s, 1 + s lie at 1 and 1 + s, their median halfway.
    def spread_of(s: float) -> Sample:
        return sample(1.0, 1.0, 1.0 + s, 1.0 + s)

    assert spread_of(0.2).spread == pytest.approx(0.2 / 1.1)
    assert [spread_of(s).quality for s in (0.05, 0.2, 0.5)] == ["good", "usable", "suspect"]
    assert sample(1.0, 9.0, 9.0).spread == 0.0
    assert sample(1.0, 9.0, 9.0).quality == "good"
    assert sample(1.0, marks=("drift",)).quality == "suspect"
    assert sample(1.0, error="out of memory").quality == "suspect"


@pytest.mark.parametrize(("question_of", "what"), [
    (lambda: Question(**encode(SHAPE), tokens=0),
     "--tokens must be from 1 to 2147483648, got 0"),
    (lambda: Question(**encode(SHAPE)), "the number of tokens is missing"),
    (Question, "there is nothing to plan for"),
    (lambda: Question(model="ppmoe-6.7b"), "ppmoe-6.7b is a whole model, and no layer"),
    (lambda: Question(model="gpt-s", order="interleaved", expert_parallel="tensor"),
     "--order interleaved excludes --expert-parallel tensor, where a chunk has one transfer"),
])  # fmt: skip
def test_a_wrong_request_is_refused(question_of: Callable[[], Question], what: str) -> None:
    with pytest.raises(InputError) as caught:
        check_layer(question_of())
    assert caught.value.what == what


def test_a_step_slower_than_predicted_has_an_error_below_0() -> None:
    assert prediction_error(1.0, 1.25) == pytest.approx(-0.2)
    assert prediction_error(3.0, 2.5) == pytest.approx(0.2)
    assert prediction_error(1.0, 0.0) == 0.0  # a step of no time has no error


def test_a_gpu_as_it_is_sold_has_what_a_reference_machine_of_it_has() -> None:
    h100 = load_profile_file(bundled_profiles()["h100-x8"]).machine
    assert process_bytes("80GB") == h100.memory_bytes
    assert h100.plannable_bytes == process_bytes("80G") * 92 // 100
    assert process_bytes("79.11GiB") == pytest.approx(h100.memory_bytes, abs=1)
    assert process_bytes("81559MiB") == 81559 * 2**20 - 2 * 2**30
    for text in ("2GiB", "0GB"):
        with pytest.raises(InputError, match="nothing left"):
            process_bytes(text)
