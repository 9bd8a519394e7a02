"""Multiprocessors of dispatchers: published times by their number, and what overlap loses."""

from dataclasses import replace

import pytest

from moetune.domain.errors import InputError, ProfileError
from moetune.domain.profile import Profile
from moetune.domain.reference import TransferPhase
from moetune.domain.target_rules import target_rules
from moetune.domain.targets import TARGETS, find_target
from moetune.domain.training import FoldedLayout, LayoutRequest, TokenDispatcher, TrainingJob
from moetune.domain.training_rules import broken_rules
from moetune.fit.dispatchers import SmTimes
from moetune.huggingface.registry import named_model
from moetune.solve.training.multiprocessors import hidden_share
from moetune.solve.training.posted import posted_chunks
from moetune.solve.training.stages import DecoderStages
from moetune.solve.training.step import StepPrices, StepSeconds
from moetune.workflows.files import bundled_profiles, load_profile_file
from moetune.workflows.training import plan_training
from moetune.workflows.training_plan import TrainingRequest
from moetune.workflows.training_prices import device_prices

H100, EFA, H800, B200 = (
    load_profile_file(bundled_profiles()[name])
    for name in ("h100-x8", "h100-x8-efa", "h800-x8", "b200-x8")
)
JOB = TrainingJob(
    decoder=named_model("qwen3-30b-a3b").decoder, world_size=64, global_batch=256, length=4096
)
PHASES: tuple[tuple[TransferPhase, int], ...] = (("dispatch", 7168), ("combine", 2 * 7168))
INSIDE = FoldedLayout(dp=64, ep=8, dispatcher="deepep")


def step_of(layout: FoldedLayout, profile: Profile = H100, *, known: bool = True) -> StepSeconds:
    device = device_prices(profile)
    prices = StepPrices(
        job=JOB, device=device if known else replace(device, transfers=None),
        stages=DecoderStages(JOB.decoder), target=find_target("megatron"),
    )  # fmt: skip
    return prices.step(layout)


def test_times_by_multiprocessors_are_those_published() -> None:
    """4,096 tokens of 7,168 elements, top-8 among eight ranks: in 8 bits out, in 16 back."""
    times, rows = SmTimes(profile=H100), 4096 * 8 * (1 - (7 / 8) ** 8)
    assert times.known("deepep") == (4, 8, 12, 16, 20, 24)
    assert times.known("hybrid_ep") == SmTimes(profile=H800).known("deepep") == ()
    for sms, out, back in ((4, 2068, 3897), (12, 754, 1417), (20, 492, 983)):
        for group_size in (8, 4):  # the nearest group stands for others
            found = [
                times.seconds("deepep", phase, group_size=group_size, num_sms=sms, rows=rows,
                              width_bytes=width)
                for phase, width in PHASES
            ]  # fmt: skip
            assert found == pytest.approx([out * 1e-6, back * 1e-6], rel=0.05)
    between = [
        times.seconds("deepep", "combine", group_size=8, num_sms=sms, rows=rows, width_bytes=7168)
        for sms in (8, 10, 12)
    ]
    assert between == sorted(between, reverse=True)
    assert between[1] == pytest.approx(
        between[0] ** (1 - 0.5503) * between[2] ** 0.5503, rel=1e-3
    )  # log(10/8) / log(12/8)


def test_the_usual_number_changes_nothing_and_fewer_are_slower() -> None:
    plain = step_of(INSIDE)
    assert step_of(replace(INSIDE, dispatcher_sms=20)) == plain
    exchanges = [
        step_of(replace(INSIDE, dispatcher_sms=sms)).parts["exchange"] for sms in (4, 8, 16, 20, 24)
    ]
    assert exchanges == sorted(exchanges, reverse=True)
    # Published: 4 instead of 20 multiprocessors take 4.2 times as long out and 4.0 back.
    assert exchanges[0] / plain.parts["exchange"] == pytest.approx(4.0, rel=0.1)
    assert step_of(replace(INSIDE, dispatcher_sms=4), known=False) == plain


def test_between_nodes_the_network_binds_until_the_inside_is_slower() -> None:
    across = replace(INSIDE, ep=32)
    plain = step_of(across)
    assert step_of(replace(across, dispatcher_sms=24)) == plain
    assert step_of(replace(across, dispatcher_sms=12)) == plain
    slower = step_of(replace(across, dispatcher_sms=4), H100).parts["exchange"]
    assert slower >= plain.parts["exchange"]


def test_posted_chunks_have_a_channel_for_two_multiprocessors() -> None:
    across = replace(INSIDE, ep=32)
    few, many = (step_of(replace(across, dispatcher_sms=sms), EFA) for sms in (8, 24))
    assert few.parts["exchange"] != many.parts["exchange"]
    assert step_of(replace(across, dispatcher_sms=20), EFA) == step_of(across, EFA)
    assert posted_chunks(
        "dispatch", num_ranks=32, num_nodes=4, tokens=10, reach=4.0, num_channels=4
    ) == 3 * 4 * 1  # fmt: skip


@pytest.mark.parametrize(
    ("device", "sms"), [("NVIDIA H100 80GB HBM3", 132), ("NVIDIA H20", 78), ("NVIDIA B200", 148)]
)
def test_hidden_exchanges_leave_fewer_multiprocessors_to_compute(device: str, sms: int) -> None:
    for count in (8, 20, 24):
        layout = replace(INSIDE, dispatcher_sms=count)
        assert hidden_share(layout, device) == pytest.approx((sms - count) / (sms - 20))
    assert hidden_share(FoldedLayout(), device) == 1.0


def test_more_multiprocessors_help_an_exchange_that_nothing_hides_and_cost_one_that_is() -> None:
    seconds = {
        (overlap, sms): step_of(replace(INSIDE, overlap=overlap, dispatcher_sms=sms)).seconds
        for overlap in ("none", "batch")
        for sms in (20, 24)
    }
    assert seconds["none", 24] < seconds["none", 20]
    assert seconds["batch", 24] > seconds["batch", 20]


@pytest.mark.parametrize(
    ("dispatcher", "sms", "what", "hint"),
    [
        ("all_to_all", 20, "not for all_to_all", "deepep or hybrid_ep"),
        ("deepep", 21, "is odd", "20 or 22"),
        ("deepep", 1, "is odd", "2 or 2"),
        ("deepep", 24, "", ""),
        ("hybrid_ep", 17, "", ""),
    ],
)
def test_multiprocessors_are_of_dispatchers_that_have_some(
    dispatcher: TokenDispatcher, sms: int, what: str, hint: str
) -> None:
    layout = replace(INSIDE, dispatcher=dispatcher, dispatcher_sms=sms)
    rules = list(broken_rules(layout, JOB))
    assert bool(rules) == bool(what)
    for rule in rules:
        assert what in rule.what
        assert hint in rule.hint


def test_only_megatron_and_bridge_set_them() -> None:
    for name in TARGETS:
        target = find_target(name)
        if "deepep" not in target.dispatchers:
            continue
        layout = replace(INSIDE, zero=target.zero[-1], dispatcher_sms=24)
        broken = [rule.what for rule in target_rules(layout, target, JOB)]
        refused = f"{name} ({target.version}) cannot run deepep with 24 multiprocessors"
        assert broken == ([] if name in {"megatron", "bridge"} else [refused])
        assert not list(target_rules(replace(layout, dispatcher_sms=20), target, JOB))


@pytest.mark.parametrize(
    ("profile", "dispatcher", "sms", "words"),
    [
        (H100, "deepep", 2, "with 4 to 24 multiprocessors"),
        (H100, "deepep", 26, "with 4 to 24 multiprocessors"),
        (H100, "hybrid_ep", 24, "no times of hybrid_ep"),
        (H800, "deepep", 24, "no times of deepep"),
        (B200, "deepep", 24, "no times of deepep"),
    ],
)
def test_numbers_without_times_are_refused(
    profile: Profile, dispatcher: TokenDispatcher, sms: int, words: str
) -> None:
    pins = LayoutRequest(tp=1, pp=2, ep=8, dispatcher=dispatcher, dispatcher_sms=sms)
    request = TrainingRequest(job=JOB, pins=pins, target=find_target("megatron"))
    with pytest.raises(ProfileError, match=words):
        plan_training(request, profile)


def test_pinned_multiprocessors_are_in_every_layout_found() -> None:
    pins = LayoutRequest(
        tp=1, pp=2, vpp=2, ep=8, micro_batch=1, recompute=("norm",), dispatcher="deepep",
        dispatcher_sms=12,
    )  # fmt: skip
    request = TrainingRequest(job=JOB, pins=pins, target=find_target("megatron"))
    for one in plan_training(request, H100).found:
        assert (one.layout.dispatcher, one.layout.dispatcher_sms) == ("deepep", 12)
    with pytest.raises(InputError, match="not for all_to_all"):
        plan_training(replace(request, pins=replace(pins, dispatcher=None)), H100)
