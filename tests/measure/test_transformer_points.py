"""A model's points are what a layout of it asks for: nothing missing, nothing extrapolated."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from moetune.domain.cluster import Cluster, Fingerprint, Machine
from moetune.domain.costs import Costs, Estimate
from moetune.domain.gemm_forms import GemmForm
from moetune.domain.layer import LayerShape
from moetune.domain.model import Transformer
from moetune.domain.profile import Profile
from moetune.domain.samples import (
    Point,
    RowsPoint,
    Sample,
)
from moetune.fit.costs import costs_of
from moetune.measure.grid import Preset
from moetune.measure.points import choose_points
from tests import prices

MACHINE = Machine(kind="cpu", device="lab", num_devices=4, devices_per_node=2, memory_bytes=2**34)
MODEL = Transformer(
    moe=LayerShape(d_model=256, d_hidden=1024, num_experts=4),
    num_layers=4,
    num_heads=4,
    length=128,
    vocab_size=250,
)
WORDS = {1: 250, 2: 125, 4: 63}
"""Tokens of the vocabulary on the busiest of so many ranks."""
TOKENS = 1024
DTYPE = "float32"
PRODUCTS: tuple[GemmForm, ...] = ("forward", "grad_input", "grad_weight")


def points_of(
    model: Transformer = MODEL, max_tokens: int = TOKENS, preset: Preset = "quick"
) -> tuple[Point, ...]:
    return choose_points(
        cluster=Cluster(machine=MACHINE, fingerprint=Fingerprint()),
        dtypes=(DTYPE,),
        group_sizes=(2, 4),
        transformers=(model,),
        preset=preset,
        max_tokens=max_tokens,
    ).all


def costs_by(points: tuple[Point, ...]) -> Costs:
    samples = tuple(Sample(point=point, seconds=(1e-3,)) for point in points)
    return costs_of(Profile(name="lab", provenance="measured", machine=MACHINE, samples=samples))


def estimates(costs: Costs, width: int, rows: int) -> Iterator[tuple[str, Estimate | None]]:
    """Ask for everything of one micro-batch on one of `width` tensor-parallel ranks."""
    shapes = {
        "qkv": (256, 768 // width), "out": (256 // width, 256), "up": (256, 1024 // width),
        "down": (1024 // width, 256), "head": (256, WORDS[width]),
    }  # fmt: skip
    for (name, (d_in, d_out)), form in ((pair, one) for pair in shapes.items() for one in PRODUCTS):
        yield (
            f"{name} {form}",
            prices.gemm(
                costs, dtype=DTYPE, product=form, num_experts=1, rows=rows, d_in=d_in, d_out=d_out
            ),
        )
    for backward in (False, True):
        yield "attention", prices.attention(
            costs, dtype=DTYPE, num_sequences=rows / 128, length=128, num_heads=4 // width,
            head_dim=64, backward=backward,
        )  # fmt: skip
    for op, columns in (("norm", 256), ("cross_entropy", WORDS[width])):
        for direction in ("", "_backward"):
            name = op + direction
            yield name, prices.rows_op(costs, op=name, dtype=DTYPE, rows=rows, width=columns)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("sequences", [1, 2, 3, 8])
def test_every_micro_batch_at_every_tensor_parallel_width_is_covered(
    width: int, sequences: int
) -> None:
    costs = costs_by(points_of())
    for name, found in estimates(costs, width, sequences * 128):
        assert found is not None, name
        assert found.trust in ("measured", "interpolated"), name


@pytest.mark.parametrize("local_experts", [1, 2, 4])
def test_the_experts_of_every_layout_are_covered(local_experts: int) -> None:
    costs = costs_by(points_of())
    for rows in (TOKENS // local_experts, TOKENS // local_experts // 8):
        for form in PRODUCTS:
            found = prices.gemm(
                costs, dtype=DTYPE, product=form, num_experts=local_experts, rows=rows, d_in=256,
                d_out=1024,
            )  # fmt: skip
            assert found.trust in ("measured", "interpolated")


@pytest.mark.parametrize("group", [(2, 0), (2, 2), (4, 0)])
def test_the_exchange_of_all_gradients_is_covered(group: tuple[int, int]) -> None:
    attention, network = 4 * 256**2, 2 * 256 * 1024
    parameters = 4 * attention + (2 + 2 * 4) * network + 2 * 250 * 256
    found = prices.collective(
        costs_by(points_of()),
        op="all_reduce",
        group_size=group[0],
        num_nodes=group[1],
        num_bytes=4 * parameters,
    )
    assert found.trust in ("measured", "interpolated")


@pytest.mark.parametrize("op", ["adam", "accumulate"])
def test_a_step_of_the_optimiser_and_sums_are_measured_on_all_parameters_and_on_shards(
    op: str,
) -> None:
    sizes = sorted(
        point.elements for point in points_of() if isinstance(point, RowsPoint) and point.op == op
    )
    assert sizes[-1] > (2 + 2 * 4) * 2 * 256 * 1024
    assert sizes[0] <= sizes[-1] // 16


def test_a_gpu_measures_the_hosts_optimizer_step_too() -> None:
    def ops(machine: Machine) -> set[str]:
        chosen = choose_points(
            cluster=Cluster(machine=machine, fingerprint=Fingerprint()),
            dtypes=(DTYPE,), group_sizes=(2,), transformers=(MODEL,),
        )  # fmt: skip
        return {point.op for point in chosen.all if isinstance(point, RowsPoint)}

    assert "host_adam" not in ops(MACHINE)
    assert {"adam", "host_adam"} <= ops(replace(MACHINE, kind="cuda"))
