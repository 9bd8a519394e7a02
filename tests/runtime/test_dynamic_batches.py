"""Batches that change at every step: decisions follow the plan's ranges, and memory stays."""

from collections.abc import Sequence

import pytest
import torch

import moetune
from benchmarks.mpipemoe.live import HostMemory, live_tensors
from moetune.domain.constraints import Strategy
from moetune.domain.layer import LayerShape
from tests.runtime.plans import small_plan

LAYER = LayerShape(d_model=32, d_hidden=64, num_experts=4, top_k=2)
LARGEST = 512
RANGES = ((1, 63, 1, 1), (64, 255, 3, 3), (256, 4096, 4, 4))
STEPS, FEWER_STEPS = 200, 60
WARM_STEPS = 10


def power_law(steps: int) -> list[int]:
    generator = torch.Generator().manual_seed(3)
    shares = torch.rand(steps, generator=generator).pow(3)
    sizes = (shares * LARGEST).ceil().int().tolist()
    return [LARGEST, 255, *sizes[2:]]


def ramp(steps: int) -> list[int]:
    """Down, so that the largest comes first, and up again."""
    half = steps // 2
    down = [LARGEST - (LARGEST - 1) * step // (half - 1) for step in range(half)]
    return [255, *down[:-1], *reversed(down)]


def recorded(steps: int) -> list[int]:
    """A sequence as packed documents make it: mostly full, now and then a rest."""
    return [LARGEST if step % 7 else 255 - step % 97 for step in range(1, steps + 1)]


EACH_ONCE = (("none", ramp), ("S1", recorded), ("S4", power_law))


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        *(pytest.param(name, sizes(FEWER_STEPS), id=f"few-{name}") for name, sizes in EACH_ONCE),
        *(
            pytest.param(strategy, sizes(STEPS), marks=pytest.mark.thorough)
            for strategy in ("none", "S1", "S4")
            for sizes in (power_law, ramp, recorded)
        ),
    ],
)
def test_memory_stays_where_it_was_after_the_tenth_step(
    sizes: Sequence[int], strategy: Strategy
) -> None:
    plan = small_plan(
        layer=LAYER, world_size=1, tokens=LARGEST, degrees=(4, 4), ranges=RANGES, strategy=strategy
    )
    layer = moetune.MoELayer(32, 64, 4, 2, plan=plan)

    def step(tokens: int) -> None:
        layer.zero_grad()
        layer(torch.randn(tokens, 32)).sum().backward()
        degree = next(row[2] for row in RANGES if row[0] <= tokens <= row[1])
        # The plan's own size also tries one chunk in its first steps.
        assert layer.decision.forward_degree in {degree, 1 if tokens == LARGEST else degree}
        assert layer.decision.strategy == strategy

    layer(torch.randn(1, 32))  # whose first call looks the plan up
    peaks = []
    for some in (sizes[:WARM_STEPS], sizes[WARM_STEPS:]):
        with HostMemory() as host, live_tensors() as live:
            for tokens in some:
                step(tokens)
        peaks.append((live.peak_bytes, host.peak_bytes))
    (warm, warm_host), (later, later_host) = peaks
    assert later <= warm
    assert later_host <= warm_host
    assert len(sizes) in {FEWER_STEPS, STEPS}
