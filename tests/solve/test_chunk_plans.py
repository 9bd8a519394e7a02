"""Plans that keep model states in chunks."""

import math
from dataclasses import replace

import pytest

from moetune.domain.constraints import Bounds, LayoutPins
from moetune.domain.errors import InfeasiblePlanError, InputError
from moetune.domain.model import Transformer, find_model
from moetune.domain.plan import Plan, plan_from_json
from moetune.domain.profile import CopyLine, Profile, RowsLine
from moetune.domain.samples import Direction
from moetune.fit.costs import costs_of
from moetune.solve.chunks.cache import fewest_places, replay
from moetune.solve.chunks.choose import CACHE_TOLERANCE, ChunkBudget, choose_chunks, pack_modules
from moetune.solve.chunks.time import ChunkDevice, ChunkPrices, simulate
from moetune.solve.chunks.uses import modules_of, timed, uses_of
from moetune.solve.layout.choose import LayoutProblem, search_layouts
from moetune.solve.layout.plan import solve_layout
from moetune.solve.model.prices import Prices
from moetune.solve.runtime import MOETUNE
from moetune.workflows.files import plan_to_json
from tests.solve.clusters import GB, cluster_profile
from tests.solve.costs_by_hand import plan_inputs

GIB = 2**30
STATE_BYTES = 18
"""Of one parameter in mixed precision (PPMoE §4.1)."""


def profile_of(*, num_devices: int = 8, copied: float = 25 * GB) -> Profile:
    profile = cluster_profile(num_devices=num_devices, inside=200 * GB, seconds_per_mac=5e-15)
    ways: tuple[Direction, ...] = ("h2d", "d2h") if copied else ()
    lines = tuple(
        CopyLine(
            direction=way, pinned=True, alpha_seconds=1e-5, beta_seconds_per_byte=1 / copied
        )
        for way in ways
    )  # fmt: skip
    return replace(profile, copy=lines)


def question(
    name: str = "gpt-2.7b",
    *,
    gib: float = 40,
    world_size: int = 1,
    pins: LayoutPins | None = None,
    host_gib: int | None = None,
    copied: float = 25 * GB,
    tokens: int = 16_384,
) -> LayoutProblem:
    whole = whole_of(name)
    return LayoutProblem(
        inputs=plan_inputs(
            layer=whole.moe, world_size=world_size, tokens_per_rank=tokens, dtype="float16"
        ),
        model=whole, pins=pins or LayoutPins(), costs=costs_of(profile_of(copied=copied)),
        resamples=(), bounds=Bounds(), per_node=8, runs_ahead=True,
        device_memory_bytes=int(gib * GIB), provenance="modelled",
        host_bytes=None if host_gib is None else host_gib * GIB // min(8, world_size),
    )  # fmt: skip


def whole_of(name: str) -> Transformer:
    whole = find_model(name).transformer
    assert whole is not None
    return whole


@pytest.fixture(scope="module")
def offloaded() -> Plan:
    return solve_layout(question()).plan


@pytest.mark.parametrize(
    ("name", "billions"), [("gpt-2.7b", 2.7), ("gpt-20b", 20.6), ("opt-30b", 30.0)]
)
def test_dense_models_have_the_papers_parameters(name: str, billions: float) -> None:
    # Ours has a head of its own: GPT-3 and OPT share it with the embedding.
    assert whole_of(name).num_parameters / 1e9 == pytest.approx(billions, rel=0.035)
    assert whole_of(name).num_moe_layers == 0


def test_a_model_larger_than_its_device_is_offloaded(offloaded: Plan) -> None:
    chunks, whole = offloaded.chunks, offloaded.transformer
    assert chunks is not None
    assert whole is not None
    assert chunks.scatter
    assert chunks.offload
    model = whole_of("gpt-2.7b")
    assert chunks.chunk_bytes >= 2 * model.token_parameters
    assert chunks.cache_bytes % chunks.chunk_bytes == 0
    assert chunks.cache_bytes // chunks.chunk_bytes >= 2
    assert whole.memory.total_bytes <= 40 * GIB < STATE_BYTES * model.num_parameters
    assert whole.memory.parameter_bytes == chunks.cache_bytes
    assert whole.memory.optimizer_bytes == 0
    assert whole.memory.gradient_bytes == 2 * model.token_parameters
    assert whole.binding == "memory"


def test_the_parts_of_an_offloaded_step_add_up_to_it(offloaded: Plan) -> None:
    whole = offloaded.transformer
    assert whole is not None
    assert sum(part.seconds for part in whole.parts) == pytest.approx(whole.step_seconds)
    exposed = next(part for part in whole.parts if part.name == "chunk transfers")
    assert 0 < exposed.share < 0.5


def test_the_words_say_what_is_cached_what_moves_and_what_shows(offloaded: Plan) -> None:
    why = offloaded.decision.why
    assert "Model states live on the host" in why
    for words in ("the cache has", "A micro-batch gathers", "are not hidden"):
        assert words in why


def test_a_plan_with_chunks_survives_its_file(offloaded: Plan) -> None:
    assert plan_from_json(plan_to_json(offloaded), "plan.json") == offloaded


def test_a_model_that_fits_one_rank_has_no_chunks() -> None:
    assert solve_layout(question(gib=80)).plan.chunks is None


def test_replicas_without_room_for_all_shard_and_stay_on_the_device() -> None:
    pins = LayoutPins(dp=8)
    plan = solve_layout(question(world_size=8, pins=pins)).plan
    assert plan.chunks is not None
    assert plan.chunks.scatter
    assert not plan.chunks.offload
    whole = solve_layout(question(world_size=8, pins=replace(pins, zero=False), gib=80)).plan
    assert whole.chunks is not None
    assert not whole.chunks.scatter
    assert not whole.chunks.offload
    assert whole.chunks.cache_bytes >= 2 * whole_of("gpt-2.7b").num_parameters


def test_replicas_that_keep_all_need_no_price_for_shards() -> None:
    asked = question(world_size=8, gib=80, pins=LayoutPins(dp=8, zero=False))
    profile = cluster_profile(num_devices=8, without=("all_gather", "reduce_scatter"))
    chunks = solve_layout(replace(asked, costs=costs_of(profile))).plan.chunks
    assert chunks is not None
    assert not chunks.scatter


@pytest.mark.parametrize("gib", [10.5, 12, 14, 20, 40])
def test_states_are_where_the_step_is_fastest_whatever_else_would_fit(gib: float) -> None:
    def seconds(*, offload: bool | None) -> tuple[float, Plan | None]:
        pins = LayoutPins(dp=8, offload=offload, micro_batch=1)
        try:
            plan = solve_layout(question(world_size=8, gib=gib, pins=pins, copied=50 * GB)).plan
        except InfeasiblePlanError:
            return math.inf, None
        assert plan.transformer is not None
        return plan.transformer.step_seconds, plan

    free, plan = seconds(offload=None)
    assert free <= 1.0101 * min(seconds(offload=True)[0], seconds(offload=False)[0])
    assert plan is not None
    assert plan.chunks is not None
    is_offloaded = seconds(offload=True)[0] < 0.99 * seconds(offload=False)[0]
    assert plan.chunks.offload == is_offloaded


def test_no_offload_is_kept_or_refused_with_the_way_out() -> None:
    with pytest.raises(InfeasiblePlanError, match="memory") as raised:
        solve_layout(question(pins=LayoutPins(offload=False)))
    assert raised.value.hint == "let model states live on the host: omit --no-offload"


def test_a_host_that_is_too_small_is_named_with_its_bytes() -> None:
    needed = STATE_BYTES * whole_of("gpt-2.7b").num_parameters
    with pytest.raises(InfeasiblePlanError, match="on the host its states would need") as raised:
        solve_layout(question(host_gib=needed // GIB - 1))
    assert f"{needed // GIB - 1}.0 GiB are there" in raised.value.what
    assert solve_layout(question(host_gib=80)).plan.chunks is not None


@pytest.mark.parametrize("world_size", [1, 8])
def test_states_of_one_rank_are_not_sharded_whatever_they_lack(world_size: int) -> None:
    with pytest.raises(InfeasiblePlanError) as raised:
        solve_layout(question(world_size=world_size, gib=0.1, pins=LayoutPins(dp=world_size)))
    assert ("ZeRO" in raised.value.what) is (world_size > 1)


def test_without_copies_nothing_is_offloaded_and_the_hint_says_why() -> None:
    with pytest.raises(InfeasiblePlanError) as raised:
        solve_layout(question(copied=0.0))
    assert "copies to the host were not measured" in raised.value.hint


def test_a_model_of_30_billion_parameters_fits_one_device_of_40_gib() -> None:
    """Elixir's headline: OPT-30B on one A100 with 40 GB (its Fig. 6)."""
    plan = solve_layout(question("opt-30b")).plan
    assert plan.chunks is not None
    assert plan.transformer is not None
    assert plan.transformer.memory.total_bytes <= 40 * GIB


def test_slower_copies_never_make_a_faster_step() -> None:
    times = [
        search_layouts(question(copied=copied * GB))[1].best[0].seconds for copied in (50, 25, 5)
    ]
    assert times == sorted(times)


@pytest.mark.parametrize("gib", [2, 4, 8])
def test_the_cache_is_the_smallest_whose_transfers_are_hidden_as_well(gib: int) -> None:
    """Against every number of places, tried one by one."""
    model, asked = whole_of("gpt-2.7b"), question()
    prices = Prices(
        model=model,
        dtype="float16",
        costs=asked.costs,
        bounds=Bounds(),
        per_node=8,
        runtime=MOETUNE,
    )
    layout = solve_layout(asked).plan.layout
    groups = prices.groups(layout)
    priced = prices.priced(layout=layout, groups=groups, sequences=2, one_chunk=True)
    costs = ChunkPrices(costs=asked.costs, groups=groups, dtype="float16", offload=True)
    modules = timed(modules_of(model, layout=layout, dtype="float16"), model=model, priced=priced)
    room = ChunkBudget(device_bytes=gib * GIB, host_bytes=None, activation_bytes=0, buffer_bytes=0)
    packed = pack_modules(modules, prices=costs, each=prices.state_bytes, budget=room)
    found = choose_chunks(modules, packed, prices=costs, budget=room, recompute=False)
    assert found is not None
    order = uses_of(modules, packed.moving, recompute=False)
    left = gib * GIB - 2 * model.token_parameters
    most = min(left // packed.chunk_bytes, len(packed.chunks))
    times = {
        places: simulate(
            order,
            replay(order, num_places=places),
            costs={index: costs.cost(chunk)[0] for index, chunk in packed.moving.items()},
            machine=ChunkDevice(copies_inline=False, updates_on_host=True),
        ).seconds
        for places in range(fewest_places(order), most + 1)
    }
    good = [places for places, time in times.items() if time <= (1 + CACHE_TOLERANCE) * times[most]]
    assert found.num_places == min(good)
    assert found.time.seconds == pytest.approx(times[found.num_places])


def test_dense_models_refuse_pins_of_experts() -> None:
    with pytest.raises(InputError, match="the model is dense"):
        solve_layout(question(pins=LayoutPins(expert_parallel="tensor")))
    with pytest.raises(InputError, match=r"moe_every .*0.*64"):
        replace(whole_of("ppmoe-6.7b"), moe_every=0)


def test_chunks_are_stepped_within_the_backward_pass_of_the_only_micro_batch() -> None:
    slow_update = RowsLine(
        op="host_adam", dtype="float16", alpha_seconds=0.0, beta_seconds_per_element=1e-11
    )
    costs = costs_of(replace(profile_of(), rows=(slow_update,)))
    pins = LayoutPins(micro_batch=1, offload=True)

    def why(num_sequences: int) -> str:
        asked = replace(question(tokens=2048 * num_sequences, pins=pins), costs=costs)
        plan = solve_layout(asked).plan
        assert plan.transformer is not None
        assert plan.transformer.num_micro_batches == num_sequences
        return plan.decision.why

    assert "`step_in_backward=True`" in why(1)
    assert "`step_in_backward=True`" not in why(2)
