"""Exchanges in chunks in a training step: against simulated events and all degrees one by one."""

from dataclasses import replace

import pytest

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.domain.interference import CommSpeed, CompSpeed, Interference
from moetune.domain.profile import Profile
from moetune.domain.targets import Target, find_target
from moetune.domain.training import Degrees, FoldedLayout, Recompute, TrainingJob
from moetune.fit.costs import costs_of
from moetune.huggingface.registry import named_model
from moetune.solve.model.block import BlockPrices
from moetune.solve.model.chunks import MOST_CHUNKS, ChunkedPasses, best_degree, chunked_passes
from moetune.solve.model.pipeline import DecoderStages
from moetune.solve.model.profiled import device_prices
from moetune.solve.model.step import StepPrices

MOETUNE = find_target("moetune")
H100, H800 = (load_profile_file(bundled_profiles()[name]) for name in ("h100-x8", "h800-x8"))
CHUNKED = FoldedLayout(dp=64, ep=8, overlap="chunks")
DISTURBED = Interference(comp=CompSpeed(comm=0.8), comm=CommSpeed(comp=0.7))


def prices_of(name: str, profile: Profile = H100, target: Target = MOETUNE) -> StepPrices:
    job = TrainingJob(
        decoder=named_model(name).decoder, world_size=64, global_batch=256, length=4096
    )
    return StepPrices(
        job=job, device=device_prices(profile, costs_of(profile, allow_modelled=True)),
        stages=DecoderStages(job.decoder), target=target,
    )  # fmt: skip


def passes_of(forward: tuple[float, ...], backward: tuple[float, ...]) -> ChunkedPasses:
    """Return passes that take so long in 1, 2, … chunks, and the last from there on."""
    return ChunkedPasses(
        *(
            dict(enumerate(some + some[-1:] * (MOST_CHUNKS - len(some)), start=1))
            for some in (forward, backward)
        )
    )


def test_some_degrees_are_priced_as_among_all() -> None:
    job = prices_of("qwen3-30b-a3b").job
    device = device_prices(H100, costs_of(H100, allow_modelled=True))
    prices = BlockPrices(job=job, layout=CHUNKED, device=device)
    part = job.decoder.blocks[-1].routed
    assert part is not None
    every, some = (
        chunked_passes(prices, part, degree=None),
        chunked_passes(prices, part, degree=3),
    )
    for mine, its in zip(some, every, strict=True):
        assert mine == {num: its[num] for num in (1, 3)}
    assert every.saved(1, repeats=True) == (0.0, 0.0)


@pytest.mark.parametrize("recompute", [(), ("full",)])
@pytest.mark.parametrize(("profile", "ep"), [(H100, 8), (H100, 64), (H800, 16)])
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3"])
def test_no_degree_is_faster_than_the_chosen_and_none_slower_than_no_overlap(
    name: str, profile: Profile, ep: int, recompute: tuple[Recompute, ...]
) -> None:
    prices = prices_of(name, profile)
    layout = replace(CHUNKED, ep=ep, recompute=recompute)
    chosen, degrees = prices.step(layout), prices.blocks.degree(layout)
    assert degrees is not None
    plain = prices.step(replace(layout, overlap="none"))
    steps = {
        num: prices.step(replace(layout, degree=Degrees.of_both(num))).seconds
        for num in range(1, MOST_CHUNKS + 1)
    }
    alone = prices.blocks.seconds(replace(layout, overlap="none"))
    allowed = [
        num
        for num in steps
        if all(
            chunked.forward <= whole.forward * (1 + 1e-12)
            and chunked.backward <= whole.backward * (1 + 1e-12)
            for chunked, whole in zip(
                prices.blocks.seconds(replace(layout, degree=Degrees.of_both(num))),
                alone, strict=True,
            )
        )
    ]  # fmt: skip
    best = min(steps[num] for num in allowed)
    assert chosen.seconds == steps[degrees.common] == pytest.approx(best, rel=1e-9)
    assert steps[1] == pytest.approx(plain.seconds, rel=1e-12)
    exchanges = plain.parts["exchange"] * (1.5 if recompute else 1.0)
    assert plain.seconds - exchanges <= chosen.seconds <= plain.seconds
    assert sum(chosen.parts.values()) == pytest.approx(chosen.seconds)
    assert min(chosen.parts.values()) > -1e-12


def test_the_best_degree_of_blocks_is_that_of_all() -> None:
    fast = passes_of((1.0, 0.8, 0.7), (2.0, 1.5))
    other = passes_of((3.0, 2.9, 2.95), (2.0, 1.8, 1.4))
    blocks = [(2, fast), (1, other)]

    def seconds(degree: int) -> float:
        return sum(count * sum(each[degree] for each in block) for count, block in blocks)

    assert best_degree(blocks, repeats=False) == 3
    assert seconds(3) == pytest.approx(min(map(seconds, range(1, MOST_CHUNKS + 1))))
    assert best_degree([(1, fast)], repeats=False) == 3
    assert best_degree([], repeats=False) == 1


def test_a_repeated_forward_pass_saves_twice() -> None:
    passes = passes_of((1.0, 0.8, 0.9), (2.0, 2.1, 1.95))
    assert passes.saved(2, repeats=False) == pytest.approx((0.2, -0.1))
    assert passes.saved(2, repeats=True) == pytest.approx((0.2, 0.1))
    assert best_degree([(1, passes)], repeats=False) == 3  # in two chunks one pass is slower
    assert best_degree([(1, passes)], repeats=True) == 2


def test_nothing_is_cut_without_an_exchange() -> None:
    layout, prices = FoldedLayout(dp=64), prices_of("qwen3-30b-a3b", target=MOETUNE)
    cut = replace(layout, overlap="chunks")
    assert prices.blocks.degree(cut) == Degrees.of_both(1)
    assert prices.step(cut).seconds == prices.step(layout).seconds
