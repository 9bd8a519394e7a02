"""A model's points are what a plan of its training asks for: nothing missing or extrapolated."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from moetune.domain.cluster import Machine
from moetune.domain.cost_keys import AttentionKey, CollectiveKey, GemmKey
from moetune.domain.costs import Costs, Estimate, seconds_if_known
from moetune.domain.layer import LayerShape
from moetune.domain.model import Transformer
from moetune.domain.profile import Profile
from moetune.domain.samples import AttentionPoint, GemmForm, GemmPoint, Point, RowsPoint, Sample
from moetune.fit.costs import costs_of
from moetune.huggingface.registry import named_model, paper_decoder
from moetune.measure.grid import Preset
from moetune.measure.layer_points import MeasuredModel
from moetune.measure.points import PointScope

MACHINE = Machine(kind="cpu", device="lab", num_devices=4, devices_per_node=2, memory_bytes=2**34)
MODEL = Transformer(moe=LayerShape(d_model=256, d_hidden=1024, num_experts=4), num_layers=4,
                    num_heads=4, length=128, vocab_size=250)  # fmt: skip
WORDS = {1: 250, 2: 125, 4: 63}
"""Tokens of the vocabulary on the busiest of so many ranks."""
TOKENS = 1024
DTYPE = "float32"
PRODUCTS: tuple[GemmForm, ...] = ("forward", "grad_input", "grad_weight")


def measured(model: Transformer) -> MeasuredModel:
    return MeasuredModel(decoder=paper_decoder("lab", model), length=model.length)


def points_of(
    model: Transformer = MODEL, max_tokens: int = TOKENS, preset: Preset = "quick"
) -> tuple[Point, ...]:
    return (
        PointScope(machine=MACHINE, dtypes=(DTYPE,), group_sizes=(2, 4), models=(measured(model),),
                   preset=preset, max_tokens=max_tokens)
        .points()
        .all
    )  # fmt: skip


def costs_by(points: tuple[Point, ...]) -> Costs:
    samples = tuple(Sample(point=point, seconds=(1e-3,)) for point in points)
    return costs_of(Profile(name="lab", provenance="measured", machine=MACHINE, samples=samples))


def estimates(costs: Costs, width: int, rows: int) -> Iterator[tuple[str, Estimate[float] | None]]:
    """Ask for everything of one micro-batch on one of `width` tensor-parallel ranks."""
    shapes = {"qkv": (256, 768 // width), "out": (256, 256 // width), "up": (256, 1024 // width),
              "down": (1024 // width, 256), "head": (256, WORDS[width])}  # fmt: skip
    for (name, (d_in, d_out)), form in ((pair, op) for pair in shapes.items() for op in PRODUCTS):
        yield (f"{name} {form}", costs.seconds(GemmKey(DTYPE, form, 1, d_in, d_out), rows))
    for backward in (False, True):
        yield (
            "attention",
            seconds_if_known(
                costs, AttentionKey(DTYPE, 128, 4 // width, 64, backward=backward), rows / 128
            ),
        )


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("sequences", [1, 2, 3, 8])
def test_every_micro_batch_at_every_tensor_width_is_covered(width: int, sequences: int) -> None:
    costs = costs_by(points_of())
    for name, estimate in estimates(costs, width, sequences * 128):
        assert estimate is not None, name
        assert estimate.trust in ("measured", "interpolated"), name


@pytest.mark.parametrize("local_experts", [1, 2, 4])
def test_the_experts_of_every_layout_are_covered(local_experts: int) -> None:
    costs = costs_by(points_of())
    for rows in (TOKENS // local_experts, TOKENS // local_experts // 8):
        for form in PRODUCTS:
            estimate = costs.seconds(GemmKey(DTYPE, form, local_experts, 256, 1024), rows)
            assert estimate.trust in ("measured", "interpolated")


@pytest.mark.parametrize("group", [(2, 0), (2, 2), (4, 0)])
def test_collectives_of_all_gradients_and_parameters_are_covered(group: tuple[int, int]) -> None:
    attention, network = 4 * 256**2, 2 * 256 * 1024
    parameters = 4 * attention + (2 + 2 * 4) * network + 2 * 250 * 256
    costs = costs_by(points_of())
    reduced = costs.seconds(CollectiveKey("reduce_scatter", group[0], group[1]), 4 * parameters)
    gathered = costs.seconds(
        CollectiveKey("all_gather", group[0], group[1]), 4 * parameters / group[0]
    )
    assert {reduced.trust, gathered.trust} <= {"measured", "interpolated"}


def test_a_step_of_the_optimiser_is_measured_on_all_parameters_and_on_shards() -> None:
    sizes = sorted(
        point.elements
        for point in points_of()
        if isinstance(point, RowsPoint) and point.op == "adam"
    )
    assert sizes[-1] > (2 + 2 * 4) * 2 * 256 * 1024
    assert sizes[0] <= sizes[-1] // 16


def test_a_gpu_measures_the_hosts_optimizer_step_too() -> None:
    def ops(machine: Machine) -> set[str]:
        chosen = PointScope(machine=machine, dtypes=(DTYPE,), group_sizes=(2,),
                            models=(measured(MODEL),)).points()  # fmt: skip
        return {point.op for point in chosen.all if isinstance(point, RowsPoint)}

    assert "host_adam" not in ops(MACHINE)
    assert {"adam", "host_adam"} <= ops(replace(MACHINE, kind="cuda"))


def test_a_dense_model_measures_no_experts() -> None:
    dense = replace(MODEL, moe=replace(MODEL.moe, num_experts=1), moe_every=0)
    gemms = [point for point in points_of(dense) if isinstance(point, GemmPoint)]
    assert {point.num_experts for point in gemms} == {1}


def test_a_model_of_hugging_face_has_its_shared_experts_and_latent_projections_measured() -> None:
    decoder = named_model("deepseek-v2-lite").decoder
    points = PointScope(
        machine=MACHINE, dtypes=(DTYPE,),
        group_sizes=(2,), models=(MeasuredModel(decoder=decoder, length=128),), max_tokens=128,
    ).points().all  # fmt: skip
    shapes = {
        (point.d_in, point.d_out)
        for point in points
        if isinstance(point, GemmPoint) and point.num_experts == 1
    }
    shared = next(block.routed for block in decoder.blocks if block.routed is not None).shared
    assert shared is not None
    assert {(2048, 2 * shared.d_hidden), (shared.d_hidden, 2048), (2048, 64)} <= shapes
    assert not [point for point in points if isinstance(point, AttentionPoint)]
