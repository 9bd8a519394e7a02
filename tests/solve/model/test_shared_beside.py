"""Shared experts beside the exchanges of a training step: against simulated events."""

import itertools
from dataclasses import replace

import pytest

from moetune.domain.interference import Interference
from moetune.domain.samples import ResourceClass
from moetune.domain.training import Degrees, FoldedLayout, Overlap, Recompute
from moetune.fit.costs import costs_of
from moetune.solve.layer.degree import makespan
from moetune.solve.layer.timeline import COMPUTE, Task, pipeline_tasks, simulate
from moetune.solve.model.block import BlockPrices
from moetune.solve.model.chunks import MOST_CHUNKS, chunked_passes, hidden_by_shared_experts
from moetune.solve.model.machine import DevicePrices
from moetune.solve.model.step import StepPrices
from tests.solve.model.test_chunks import DISTURBED, H100, H800, MOETUNE, prices_of

EXCHANGED = FoldedLayout(dp=64, ep=8)
ALONE = Interference()


def simulated(
    degree: int, transfer: float, compute: float, beside: float, interference: Interference
) -> tuple[float, float]:
    """Return when a pass ends that computes something before its experts, and one behind them."""
    tasks = pipeline_tasks(
        dispatch_seconds=[transfer] * degree, combine_seconds=[transfer] * degree,
        compute_seconds=[compute] * degree, order="dispatch_first",
    )  # fmt: skip
    shared = Task("shared experts", "comp", COMPUTE, beside)
    first, last = (
        simulate(each, interference=interference).makespan_seconds
        for each in ([shared, *tasks], [*tasks, shared])
    )
    return first, last


@pytest.mark.parametrize("interference", [ALONE, DISTURBED], ids=["alone", "disturbed"])
def test_a_pass_with_shared_experts_ends_when_its_simulated_events_do(
    interference: Interference,
) -> None:
    among: frozenset[ResourceClass] = frozenset({"comm", "comp"})
    mu, sigma = interference.speed("comm", among), interference.speed("comp", among)
    grid = itertools.product(
        (1, 2, 3, 7), (0.3, 1.0, 2.5), (0.2, 1.0, 4.0), (0.0, 0.1, 0.9, 3.0, 40.0)
    )
    for degree, transfer, compute, beside in grid:
        found = makespan(
            degree=degree, transfer_seconds=transfer, compute_seconds=compute,
            beside_seconds=beside, comm_speed=mu, comp_speed=sigma,
        )  # fmt: skip
        both = simulated(degree, transfer, compute, beside, interference)
        assert both == pytest.approx((found, found))


@pytest.mark.parametrize("interference", [ALONE, DISTURBED], ids=["alone", "disturbed"])
@pytest.mark.parametrize("ep", [8, 32])
@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-30b-a3b"])
def test_passes_of_a_model_end_when_their_simulated_events_do(
    name: str, ep: int, interference: Interference
) -> None:
    job, layout = prices_of(name).job, replace(EXCHANGED, ep=ep)
    costs = costs_of(replace(H100, interference=interference), allow_modelled=True)
    device = DevicePrices(
        costs=costs, machine=H100.machine, sustained=1.0, gap_seconds=0.0, posted_chunk_seconds=0.0
    )
    prices = BlockPrices(job=job, layout=layout, device=device, target=MOETUNE)
    part = job.decoder.blocks[-1].routed
    assert part is not None
    assert (part.shared is not None) == (name == "deepseek-v3")
    shared = prices.routed_times(part).passes("shared_experts")
    found = chunked_passes(prices, part, degree=None)
    whole, sent = prices.chunk(part, 1)
    for degree in (1, 2, 5, MOST_CHUNKS):
        experts, exchange = prices.chunk(part, degree)
        for place, chunked, compute, most, both, all_of_both, beside in (
            (0, found.forward, experts.forward, whole.forward, exchange.forward, sent.forward,
             shared.forward),
            (1, found.backward, experts.backward, whole.backward, exchange.grad_input,
             sent.grad_input, shared.backward),
        ):  # fmt: skip
            transfer, each = max(both, all_of_both / degree) / 2, max(compute, most / degree)
            wanted = simulated(degree, transfer, each, beside, interference)[place]
            assert chunked.seconds[degree] == pytest.approx(wanted)
    work = (
        whole.forward + sent.forward + shared.forward,
        whole.backward + sent.grad_input + shared.backward,
    )
    one_chunk = found.forward.seconds[1], found.backward.seconds[1]
    hidden = [one - other for one, other in zip(work, one_chunk, strict=True)]
    assert hidden_by_shared_experts(prices, part) == pytest.approx(hidden)
    assert (min(hidden) > 0) == (part.shared is not None)


def without(prices: StepPrices) -> StepPrices:
    """Return the prices of a runtime that runs shared experts before the exchanges."""
    target = replace(prices.target, shared_beside=False)
    return StepPrices(job=prices.job, device=prices.device, stages=prices.stages, target=target)


@pytest.mark.parametrize("recompute", [(), ("moe",), ("full",)])
@pytest.mark.parametrize("overlap", ["none", "chunks"])
def test_a_step_is_shorter_by_what_shared_experts_hide(
    overlap: Overlap, recompute: tuple[Recompute, ...]
) -> None:
    prices = prices_of("deepseek-v3", H800)
    for ep, pp in ((8, 1), (32, 1), (16, 2)):
        layout = replace(
            EXCHANGED, ep=ep, dp=64 // pp, pp=pp, recompute=recompute, overlap=overlap,
            degree=Degrees.of_both(1) if overlap == "chunks" else None,
        )  # fmt: skip
        before, found = without(prices).step(layout), prices.step(layout)
        assert before.hidden_by_shared_experts == 0 < found.hidden_by_shared_experts
        assert sum(found.parts.values()) == pytest.approx(found.seconds)
        hidden = before.parts["exchange"] + before.parts.get("recompute", 0.0)
        exposed = found.parts["exchange"] + found.parts.get("recompute", 0.0)
        repeats = 1.5 if recompute else 1.0  # forward is computed and hidden twice
        assert (
            found.hidden_by_shared_experts
            <= hidden - exposed + 1e-12
            <= repeats * found.hidden_by_shared_experts * (1 + 1e-9)
        )
        # While shared experts compute beside an exchange, gradients do not have the link.
        added = found.parts["gradients"] - before.parts["gradients"]
        assert added >= 0
        others = {"exchange", "recompute", "bubble and sends", "gradients"}
        for name in before.parts.keys() - others:
            assert found.parts[name] == before.parts[name], name
        if pp == 1:
            assert before.seconds - found.seconds == pytest.approx(hidden - exposed - added)
