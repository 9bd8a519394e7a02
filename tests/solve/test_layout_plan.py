"""Plans of the papers' models: their parameters, parts, reasons and rivals."""

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.constraints import Bounds, LayoutPins
from moetune.domain.document import canonical_json, encode
from moetune.domain.errors import InfeasiblePlanError, InputError, ProfileError
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.model import Transformer, find_model
from moetune.domain.plan import Plan, plan_from_document, plan_from_json
from moetune.domain.samples import CollectiveOp
from moetune.fit.costs import costs_of
from moetune.solve.layer.choose import DegreeChooser
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.search_space import search_space
from moetune.solve.layer.settled_ranges import Gap
from moetune.solve.layout.choose import LayoutProblem, search_layouts
from moetune.solve.layout.plan import solve_layout
from moetune.solve.layout.words import explain_layout_loss, parts_of, trust_of, unmeasured_warnings
from moetune.solve.runtime import TargetRuntime
from tests import prices
from tests.solve.clusters import GB, cluster_profile
from tests.solve.costs_by_hand import ALL_TO_ALL, GEMM, LinearCosts, plan_inputs

GIB, MIB = 2**30, 2**20
SMALL = Transformer(
    moe=LayerShape(d_model=256, d_hidden=1024, num_experts=8), num_layers=4, num_heads=4,
    length=256, vocab_size=1000,
)  # fmt: skip
MODEL_LAYER = LayerShape(d_model=1024, d_hidden=4096, num_experts=64)


def question(
    *,
    world_size: int = 32,
    tokens: int = 16_384,
    pins: LayoutPins | None = None,
    memory_bytes: int = 32 * GIB,
    model: Transformer | None = None,
    between: float = 12.5 * GB,
    seconds_per_mac: float = 2e-14,
    without: tuple[CollectiveOp, ...] = (),
    constraints: Mapping[str, str] | None = None,
) -> LayoutProblem:
    whole = model or find_model("ppmoe-6.7b").transformer
    assert whole is not None
    profile = cluster_profile(
        num_devices=world_size, between=between, without=without, seconds_per_mac=seconds_per_mac
    )
    inputs = plan_inputs(
        layer=whole.moe, world_size=world_size, tokens_per_rank=tokens, dtype="float16",
        constraints=constraints,
    )  # fmt: skip
    return LayoutProblem(
        inputs=inputs, model=whole, pins=pins or LayoutPins(), costs=costs_of(profile),
        resamples=(), bounds=Bounds(), per_node=8, runs_ahead=True,
        device_memory_bytes=memory_bytes,
        provenance="modelled",
    )  # fmt: skip


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solve_layout(question()).plan


@pytest.mark.parametrize(("name", "billions"), [("ppmoe-6.7b", 6.7), ("ppmoe-143b", 143)])
def test_models_have_the_papers_parameters(name: str, billions: float) -> None:
    whole = find_model(name).transformer
    assert whole is not None
    assert whole.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_the_parts_of_a_model_are_all_of_its_parameters() -> None:
    model = Transformer(
        moe=LayerShape(d_model=8, d_hidden=16, num_experts=4, activation="swiglu"), num_layers=3,
        num_heads=2, length=5, vocab_size=11, moe_every=2,
    )  # fmt: skip
    embeddings = 11 * 8 + 5 * 8
    attention, norms, network = 4 * 8 * 8, 2 * 2 * 8, 3 * 8 * 16
    blocks = 3 * (attention + norms) + 2 * network + (8 * 4 + 4 * network)
    assert model.num_parameters == embeddings + blocks + 2 * 8 + 11 * 8


@pytest.mark.unmeasured
def test_parts_add_up_to_the_step_and_shares_to_one(plan: Plan) -> None:
    whole = plan.transformer
    assert whole is not None
    assert sum(part.seconds for part in whole.parts) == pytest.approx(whole.step_seconds)
    assert sum(part.share for part in whole.parts) == pytest.approx(1)
    assert whole.tokens_per_second_per_rank == pytest.approx(16_384 / whole.step_seconds)
    names = {part.name for part in whole.parts}
    assert {"experts", "attention", "dense FFN", "head and loss", "gradients", "bubble"} <= names


def test_a_plan_names_the_layouts_that_lost_by_time_and_one_of_the_other_kind(plan: Plan) -> None:
    whole = plan.transformer
    assert whole is not None
    layouts = [one for one in plan.alternatives if one.layout is not None]
    fitting = [one for one in layouts if "does not fit" not in one.lost_because]
    assert fitting[0].step_seconds >= whole.step_seconds
    kinds = {one.layout.expert_parallel for one in fitting if one.layout}
    assert kinds == {"all_to_all", "tensor"}
    assert all(one.lost_because.startswith(("+", "as fast")) for one in fitting)
    assert all(one.memory_bytes and one.memory_bytes > 32 * GIB for one in layouts[len(fitting) :])


def test_micro_batches_of_all_replicas_are_the_whole_batch(plan: Plan) -> None:
    whole = plan.transformer
    assert whole is not None
    tokens = whole.micro_batch_tokens * whole.num_micro_batches * plan.layout.dp
    assert tokens == 32 * 16_384
    assert plan.layout.dp * plan.layout.tp * plan.layout.pp == 32


def layer_times_by_hand(tokens: int) -> dict[str, list[float]]:
    """Return each phase's seconds in 1, 2, … 64 chunks, of a layer over 32 ranks in 4 nodes."""
    rows, share = tokens * MODEL_LAYER.top_k, 31 / 32
    alpha, beta = 31 * 2e-5, share / (3 * GB / 8)  # eight devices share a node's wire
    found: dict[str, list[float]] = {}
    for phase, num_gemms in (("forward", 2), ("backward", 4)):
        for degree in range(1, 65):
            chunk = rows / degree
            t_d = alpha + beta * chunk * MODEL_LAYER.d_model * 2
            t_e = num_gemms * (2e-5 + 2e-14 * chunk * MODEL_LAYER.d_model * MODEL_LAYER.d_hidden)
            seconds = max(2 * degree * t_d, 2 * t_d + degree * t_e)
            found.setdefault(phase, []).append(seconds)
    return found


def test_the_layer_in_a_model_runs_in_as_many_chunks_as_are_fastest() -> None:
    slow = question(between=3 * GB, pins=LayoutPins(dp=32, ep=32, micro_batch=8))
    plan = solve_layout(slow).plan
    tokens = 8 * 2048
    assert (plan.workload.world_size, plan.workload.tokens_per_rank) == (32, tokens)
    decision = plan.decide(tokens)
    times = layer_times_by_hand(tokens)
    fastest = {phase: min(seconds) for phase, seconds in times.items()}
    assert decision.forward_degree == times["forward"].index(fastest["forward"]) + 1
    assert decision.backward_degree == times["backward"].index(fastest["backward"]) + 1
    assert min(decision.forward_degree, decision.backward_degree) > 1
    assert plan.predicted.forward_seconds == pytest.approx(fastest["forward"])
    assert plan.predicted.backward_seconds == pytest.approx(fastest["backward"])


def test_a_plan_document_is_read_back_and_an_older_one_without_models_too(plan: Plan) -> None:
    assert plan_from_json(canonical_json(plan), "plan") == plan
    old = json.loads(canonical_json(replace(plan, transformer=None)))
    del old["transformer"]
    for one in old["alternatives"]:
        del one["layout"], one["memory_bytes"]
    again = plan_from_document(old)
    assert again.transformer is None
    assert all(one.layout is None for one in again.alternatives)
    assert encode(again)["transformer"] is None


def test_the_layers_plan_has_the_degrees_that_the_search_timed() -> None:
    slow = question(between=3 * GB, pins=LayoutPins(dp=32, ep=32, micro_batch=8))
    _, found = search_layouts(slow)
    plan = solve_layout(slow).plan
    degrees = plan.pipeline.forward_degree, plan.pipeline.backward_degree
    assert degrees == found.best[0].priced.moe.step.degrees
    assert max(degrees) > 1
    assert plan.predicted.step_seconds == found.best[0].priced.moe.step.seconds


def test_a_pinned_degree_is_kept_in_every_layout_or_does_not_fit() -> None:
    pins = LayoutPins(dp=32, ep=32, micro_batch=8, zero=True)
    asked = replace(question(pins=pins), bounds=Bounds(forward_degree=4))
    plan = solve_layout(asked).plan
    assert plan.pipeline.forward_degree == 4
    assert plan.transformer is not None
    tight = plan.transformer.memory.total_bytes - 1
    squeezed = solve_layout(replace(asked, device_memory_bytes=tight)).plan
    assert squeezed.pipeline.forward_degree == 4
    assert squeezed.transformer is not None
    assert squeezed.transformer.recompute or _cache_bytes(squeezed) < _cache_bytes(plan)
    free = solve_layout(replace(asked, bounds=Bounds(), device_memory_bytes=tight)).plan
    assert free.transformer is not None
    assert free.transformer.memory.total_bytes <= tight


def degrees_by_hand(*, tokens: int, top_k: int, is_measured: bool) -> dict[str, int]:
    """Return the fewest chunks that are as good as the best, from PipeMoE's Eq. 9 to 12."""
    most = min(12, tokens)
    times: dict[str, list[float]] = {}
    for phase, num_gemms in (("forward", 2), ("backward", 4)):
        times[phase] = []
        for degree in range(1, most + 1):
            rows = tokens * top_k / degree
            t_d = ALL_TO_ALL.seconds(rows * 256 * 4)
            t_e = num_gemms * GEMM.seconds(rows * 256 * 1024)
            times[phase].append(max(2 * degree * t_d, 2 * t_d + degree * t_e))
    least, unsplit = sum(map(min, times.values())), sum(one[0] for one in times.values())
    if is_measured and least > 0.95 * unsplit:  # chunks must save a twentieth of the step
        return dict.fromkeys(times, 1)
    slack = 1.01 if is_measured else 1 + 1e-9
    return {
        phase: next(at for at, one in enumerate(each, start=1) if one <= slack * min(each))
        for phase, each in times.items()
    }


@given(tokens=st.integers(1, 4000), top_k=st.integers(1, 2), is_measured=st.booleans())
def test_both_phases_at_once_are_the_best_of_each(
    tokens: int, top_k: int, *, is_measured: bool
) -> None:
    layer = LayerShape(d_model=256, d_hidden=1024, num_experts=8, top_k=top_k)
    work = Workload(layer=layer, world_size=8, tokens_per_rank=tokens)
    chooser = DegreeChooser(
        costs=layer_costs(workload=work, costs=LinearCosts(has_points=is_measured)),
        bounds=Bounds(max_degree=12),
    )
    wanted = degrees_by_hand(tokens=tokens, top_k=top_k, is_measured=is_measured)
    forward, backward = chooser.best(tokens)
    assert {"forward": forward.degree, "backward": backward.degree} == wanted
    assert forward.degree == wanted["forward"]
    assert backward.degree == wanted["backward"]


def _cache_bytes(plan: Plan) -> int:
    assert plan.chunks is not None
    return plan.chunks.cache_bytes


@pytest.mark.unmeasured
def test_slow_wires_between_nodes_put_the_experts_of_a_layer_into_one() -> None:
    """PPMoE's claim: where the wire is slow, no layout that exchanges tokens across it wins."""
    asked = question(between=0.5 * GB)
    _, found = search_layouts(asked)
    groups = [one for one in found.best if one.layout.expert_parallel == "all_to_all"]
    inside = [one for one in groups if one.layout.ep * one.layout.tp <= 8]
    across = [one for one in groups if one.layout.ep * one.layout.tp > 8]
    assert (
        min(inside, key=lambda one: one.seconds).seconds
        < min(across, key=lambda one: one.seconds).seconds
    )
    plan = solve_layout(replace(asked, pins=LayoutPins(dp=32, ep=32))).plan
    assert plan.transformer is not None
    assert plan.transformer.binding == "all_to_all"


def test_a_tensor_rank_has_its_share_of_the_head_and_names_the_sums_that_it_costs() -> None:
    pins = LayoutPins(tp=8, pp=4, expert_parallel="tensor", micro_batch=1)
    asked = question(pins=pins)
    whole = solve_layout(asked).plan.transformer
    assert whole is not None
    count, tokens, width, words = whole.num_micro_batches, 2048, 1024, 51_200 // 8
    parts = {part.name: part.seconds for part in whole.parts}
    product = 2e-5 + 2e-14 * tokens * width * words
    assert parts["head and loss"] == pytest.approx(count * 3 * product)
    added = [
        prices.collective(asked.costs, op="all_reduce", group_size=8, num_bytes=num_bytes).seconds
        for num_bytes in (tokens * width * 2, (8 + 1) * tokens * 4)
    ]
    assert parts["vocabulary all_reduce"] == pytest.approx(count * sum(added))


@pytest.mark.unmeasured
def test_a_vocabulary_smaller_than_the_tensor_group_is_not_cut() -> None:
    model = find_model("ppmoe-6.7b").transformer
    assert model is not None
    small = question(model=replace(model, vocab_size=3))
    _, found = search_layouts(small)
    assert {one.layout.tp for one in found.best} == {1, 2}
    with pytest.raises(InputError) as raised:
        solve_layout(replace(small, pins=LayoutPins(tp=4)))
    assert raised.value.what == "vocab_size (3) leaves some of the tp (4) ranks no token"
    assert raised.value.hint == "nearest: --tp 2"


def test_hidden_gradients_leave_that_share_of_them() -> None:
    asked = question(pins=LayoutPins(dp=8, ep=8, tp=1, pp=4, micro_batch=1, zero=False))
    exposed, hidden = (
        search_layouts(replace(asked, runtime=TargetRuntime(hidden_gradients=share)))[1]
        for share in (0.0, 0.75)
    )
    quarter = exposed.best[0].gradients.seconds / 4
    assert hidden.best[0].gradients.seconds == pytest.approx(quarter)


def test_split_sends_carry_a_share_and_gather_it() -> None:
    pins = LayoutPins(dp=1, tp=8, pp=4, micro_batch=1, expert_parallel="tensor")
    asked = question(tokens=256, pins=pins)
    _, whole = search_layouts(asked)
    _, split = search_layouts(replace(asked, runtime=TargetRuntime(splits_sends=True)))
    num_bytes = 2048 * 1024 * 2
    costs = asked.costs
    sent, part = (
        prices.collective(costs, op="send", group_size=2, num_bytes=size, num_nodes=2).seconds
        for size in (num_bytes, num_bytes / 8)
    )
    gathered = prices.collective(
        costs, op="all_gather", group_size=8, num_bytes=num_bytes / 8
    ).seconds
    assert [hop.seconds for hop in whole.best[0].hops] == pytest.approx([sent] * 3)
    assert [hop.seconds for hop in split.best[0].hops] == pytest.approx([part + gathered] * 3)


def test_sharded_gradients_take_a_share_and_are_reduced_after_each_micro_batch() -> None:
    asked = question(pins=LayoutPins(dp=32, ep=32, micro_batch=2, zero=True))
    without = TargetRuntime(shards_in_chunks=False, hidden_gradients=0.0)
    _, whole = search_layouts(replace(asked, runtime=without))
    _, sharded = search_layouts(replace(asked, runtime=replace(without, shards_gradients=True)))
    (mine,), (theirs,) = sharded.best, whole.best
    assert mine.memory.gradient_bytes < theirs.memory.gradient_bytes
    assert mine.memory.parameter_bytes == theirs.memory.parameter_bytes
    assert mine.setting.num_micro_batches == 4
    assert theirs.gradients.seconds < mine.gradients.seconds < 4 * theirs.gradients.seconds


@pytest.mark.parametrize(
    ("pins", "what", "hint"),
    [
        (LayoutPins(dp=3), "dp (3) does not divide the 32 ranks", "nearest: --dp 4"),
        (LayoutPins(dp=4, tp=4, pp=4), "is 64 ranks, but there are 32", "--pp 2, or 64 ranks"),
        (LayoutPins(dp=4, tp=16), "needs a multiple of 64 ranks", "or 64 ranks"),
        (LayoutPins(pp=32), "32 stages cannot share 24 blocks", "--pp 16"),
        (LayoutPins(tp=32), "num_heads (16) does not divide by tp (32)", "--tp 16"),
        (LayoutPins(ep=6), "num_experts (64) does not divide by ep (6)", "--ep 8"),
        (LayoutPins(dp=4, ep=8), "dp (4) does not divide by ep (8)", "--ep "),
        (LayoutPins(ep=2, expert_parallel="tensor"), "ep (2)", "--ep 1"),
        (LayoutPins(tp=2, expert_parallel="all_to_all"), "not available with tp (2)", "--tp 1"),
        (LayoutPins(micro_batch=3), "micro_batch (3) does not divide", "--micro-batch 4"),
    ],
)
def test_pins_that_do_not_divide_name_the_nearest_that_do(
    pins: LayoutPins, what: str, hint: str
) -> None:
    with pytest.raises(InputError) as raised:
        solve_layout(question(pins=pins))
    assert what in raised.value.what
    assert hint in raised.value.hint


def test_tokens_that_are_no_sequences_name_the_nearest_that_are() -> None:
    with pytest.raises(InputError, match="2048") as raised:
        solve_layout(question(tokens=1000))
    assert "use 960 or 1024 tokens per rank" in raised.value.hint


def test_a_layout_that_fits_nowhere_says_what_takes_the_memory_and_what_would_fit() -> None:
    with pytest.raises(InfeasiblePlanError, match="memory") as raised:
        solve_layout(question(memory_bytes=3 * GIB))
    assert "optimizer" in raised.value.what
    assert raised.value.hint.startswith("nearest: 64 ranks instead of 32, or more memory")
    assert raised.value.hint.endswith("copies to the host were not measured: run `moetune profile`")
    assert solve_layout(question(world_size=64, memory_bytes=3 * GIB)).plan.transformer is not None


def test_too_large_without_zero_asks_for_zero() -> None:
    pins = LayoutPins(dp=32, ep=32, zero=False)
    with pytest.raises(InfeasiblePlanError) as raised:
        solve_layout(question(pins=pins, memory_bytes=8 * GIB))
    assert raised.value.hint == "shard the model states: --zero 1"
    sharded = solve_layout(question(pins=replace(pins, zero=True), memory_bytes=8 * GIB)).plan
    assert sharded.transformer is not None
    assert sharded.transformer.zero


def test_a_pinned_layout_that_is_too_large_names_one_that_fits() -> None:
    pins = LayoutPins(dp=32, ep=1, zero=False)
    with pytest.raises(InfeasiblePlanError) as raised:
        solve_layout(question(pins=pins, memory_bytes=5 * GIB))
    assert raised.value.hint.startswith("nearest: --dp ")


def test_memory_that_asks_for_it_makes_blocks_run_again_and_says_so() -> None:
    pins = LayoutPins(dp=32, ep=32, micro_batch=4, zero=True)
    free = solve_layout(question(pins=pins)).plan.transformer
    assert free is not None
    assert not free.recompute
    tight = solve_layout(question(pins=pins, memory_bytes=free.memory.total_bytes - GIB)).plan
    assert tight.transformer is not None
    assert tight.transformer.recompute
    assert tight.transformer.binding == "memory"
    assert "Memory binds" in tight.decision.why
    assert tight.transformer.step_seconds > free.step_seconds


def test_layouts_without_a_price_are_left_out_with_a_warning_or_an_error() -> None:
    plan = solve_layout(question(without=("send",))).plan
    assert plan.layout.pp == 1
    assert any("layouts" in one for one in plan.warnings)
    with pytest.raises(ProfileError, match=r"send .*2 ranks"):
        solve_layout(question(without=("send",), pins=LayoutPins(pp=4)))


def test_an_estimate_anywhere_in_the_step_lowers_its_trust() -> None:
    asked = question(pins=LayoutPins(dp=8, tp=1, pp=4))
    measured = LinearCosts(rows_seconds={"attention": 1e-12}, has_points=True)
    _, found = search_layouts(replace(asked, costs=measured))
    best = found.best[0]
    assert trust_of(best) == "measured"
    stand_in = best.gradients._replace(trust="modelled")
    assert trust_of(replace(best, gradients=stand_in)) == "modelled"
    _, found = search_layouts(replace(asked, costs=replace(measured, rows_seconds={})))
    assert trust_of(found.best[0]) == "modelled"  # products stand in for attention


def test_what_was_not_measured_is_named(plan: Plan) -> None:
    assert any("norms, the loss, the optimizer, activations" in one for one in plan.warnings)
    assert any(one.startswith("attention was not measured") for one in plan.warnings)


def _too_large(plan: Plan) -> list[int]:
    """Return the stages of the layouts that the plan names as too large."""
    return [
        one.layout.pp
        for one in plan.alternatives
        if one.layout is not None and one.lost_because.startswith("does not fit")
    ]


def test_a_layout_that_does_not_fit_is_named_where_its_step_has_a_price() -> None:
    asked = question(
        model=SMALL, world_size=4, tokens=1024, memory_bytes=80 * MIB, pins=LayoutPins(zero=False)
    )
    assert _too_large(solve_layout(asked).plan) == [4, 1]
    no_sends = costs_of(cluster_profile(num_devices=4, without=("send",)))
    assert _too_large(solve_layout(replace(asked, costs=no_sends)).plan) == [1]


def test_what_no_number_of_ranks_makes_fit_is_said() -> None:
    # Parameters of experts shrink with the ranks, one sequence's activations do not.
    with pytest.raises(InfeasiblePlanError) as raised:
        solve_layout(question(model=SMALL, world_size=1, tokens=1024, memory_bytes=MIB))
    assert raised.value.hint == (
        "no number of ranks fits: allow more memory, or take a shorter --seq"
    )
    pins = LayoutPins(dp=1, tp=1, pp=1)  # which more ranks cannot have
    with pytest.raises(InfeasiblePlanError) as pinned:
        solve_layout(question(model=SMALL, world_size=1, tokens=1024, memory_bytes=MIB, pins=pins))
    assert pinned.value.hint == raised.value.hint


def test_of_layouts_that_tie_one_that_leaves_memory_free_is_taken() -> None:
    asked = question(model=SMALL, world_size=32, tokens=256)
    _, free = search_layouts(asked)
    fastest, smaller = free.best[:2]
    assert smaller.seconds < 1.01 * fastest.seconds
    needed = fastest.memory.total_bytes
    assert smaller.memory.total_bytes < 0.9 * needed
    _, roomy = search_layouts(replace(asked, device_memory_bytes=round(needed / 0.94)))
    assert roomy.best[0].layout == fastest.layout
    tight = replace(asked, device_memory_bytes=round(needed / 0.97))
    _, found = search_layouts(tight)
    assert [one.layout for one in found.best[:2]] == [smaller.layout, fastest.layout]
    plan = solve_layout(tight).plan
    gain = 1 - fastest.seconds / smaller.seconds
    assert (
        f"{100 * gain:.1f} % faster, but leaves less than 5 % of the memory free"
        in plan.decision.why
    )
    reasons = [one.lost_because for one in plan.alternatives if one.layout == fastest.layout]
    assert reasons[0].startswith(f"-{100 * gain:.1f} %, but leaves")


def test_a_layout_that_ties_is_as_fast_and_a_slower_one_says_by_how_much() -> None:
    search, found = search_layouts(question(model=SMALL, world_size=4, tokens=1024))
    best, last = found.best[0], found.best[-1]
    mine, its = (parts_of(one, search.prices.stages(one.layout.pp)) for one in (best, last))
    tie = explain_layout_loss(other=best, parts=mine, best=best, best_parts=mine)
    assert tie == "as fast"
    slower = 100 * (last.seconds / best.seconds - 1)
    assert slower > 0.1
    lost = explain_layout_loss(other=last, parts=its, best=best, best_parts=mine)
    assert lost.startswith(f"+{slower:.1f} %: ")


def test_a_cpus_optimizer_on_the_host_is_its_own_optimizer() -> None:
    def missing(costs: LinearCosts, *, offload: bool) -> str:
        warnings = unmeasured_warnings(model=SMALL, dtype="float32", costs=costs, offload=offload)
        return next(one for one in warnings if one.startswith("not measured"))

    cpu = LinearCosts(copy_mode="inline", rows_seconds={"adam": 1e-9})
    gpu = replace(cpu, copy_mode="pinned")
    assert "optimizer" not in missing(cpu, offload=False)
    assert "optimizer" not in missing(cpu, offload=True)
    assert "the optimizer on the host" in missing(gpu, offload=True)
    assert "the optimizer on the host" in missing(replace(cpu, rows_seconds={}), offload=True)
    host = replace(gpu, rows_seconds={"host_adam": 1e-9})
    assert "optimizer" not in missing(host, offload=True)


def test_sums_of_gradients_that_were_not_measured_are_named_for_several_micro_batches() -> None:
    def warned(num_micro_batches: int, costs: LinearCosts) -> bool:
        pins = LayoutPins(dp=2, ep=2, tp=1, pp=1, zero=False, micro_batch=4 // num_micro_batches)
        asked = question(model=SMALL, world_size=2, tokens=4 * SMALL.length, pins=pins)
        plan = solve_layout(replace(asked, costs=costs)).plan
        return any("micro-batches' gradients" in one for one in plan.warnings)

    unknown = LinearCosts()
    known = replace(unknown, rows_seconds={"accumulate": 1e-9})
    assert warned(2, unknown)
    assert not warned(1, unknown)
    assert not warned(2, known)


def test_a_layer_in_a_whole_model_is_searched_without_the_whole_models_limit() -> None:
    asked = question(
        model=SMALL, world_size=2, tokens=256, pins=LayoutPins(dp=2, ep=2, micro_batch=1)
    )
    limited = replace(asked, inputs=replace(asked.inputs, memory_limit_bytes=GIB))
    plan = solve_layout(limited).plan
    assert plan.inputs.memory_limit_bytes == GIB
    space = search_space(plan=plan, tokens_per_rank=256, gap=Gap(), memory_reuse=None)
    assert space.limit_bytes is None
