"""Whole steps of a profile beside what its operations say of them."""

from collections.abc import Iterator

from moetune.domain.prediction_error import prediction_error
from moetune.domain.profile import Profile
from moetune.domain.step_errors import StepRecord
from moetune.domain.turns import TurnsRecord
from moetune.report.section import Cell, Section, Table


def measured_steps(profile: Profile) -> Iterator[Section]:
    """Yield tables of steps of layers, and of blocks of which two batches took turns."""
    yield from _steps(profile)
    yield from _turns(profile)


def _steps(profile: Profile) -> Iterator[Section]:
    """Yield whole steps beside the sums of their operations, by which predictions are corrected."""
    if not profile.steps:
        return
    table = Table(
        name="steps",
        header=(
            "layer",
            "ranks",
            "tokens",
            "chunks",
            "sum of operations",
            "measured",
            "error",
        ),
        rows=tuple(_step(one) for one in profile.steps),
    )
    yield Section(name="steps", title="Steps of layers", tables=(table,))


def _step(one: StepRecord) -> tuple[Cell, ...]:
    load, summed = one.workload, one.chunks_seconds + one.overhead_seconds
    layer, error = load.layer, prediction_error(summed, one.measured_seconds)
    name = f"{layer.d_model} × {layer.d_hidden}, {layer.num_experts} experts, {layer.activation}"
    return (
        Cell.words(name),
        Cell.count(load.world_size),
        Cell.count(load.tokens_per_rank),
        Cell.count(one.degree),
        Cell.seconds(summed),
        Cell.seconds(one.measured_seconds),
        Cell.share(error, sign=True),
    )


def _turns(profile: Profile) -> Iterator[Section]:
    """Yield blocks of which two batches take turns beside their timeline."""
    if not profile.turns:
        return
    table = Table(
        name="turns",
        header=(
            "blocks", "ranks", "tokens of a batch", "chunks", "timeline of operations", "measured",
            "error", "standard error",
        ),
        rows=tuple(_in_turns(one) for one in profile.turns),
    )  # fmt: skip
    yield Section(name="turns", title="Blocks of two batches in turns", tables=(table,))


def _in_turns(one: TurnsRecord) -> tuple[Cell, ...]:
    load, model = one.point.workload, one.point.model
    name = (
        f"{model.num_layers} of {model.moe.d_model} × {model.moe.d_hidden}, "
        f"{model.moe.num_experts} experts"
    )
    if one.point.split == "positions":
        name += ", halves of positions"
    return (
        Cell.words(name),
        Cell.count(load.world_size),
        Cell.count(load.tokens_per_rank),
        Cell.count(one.point.degree),
        Cell.seconds(one.predicted_seconds),
        Cell.seconds(one.measured_seconds),
        Cell.share(prediction_error(one.predicted_seconds, one.measured_seconds), sign=True),
        Cell.share(one.standard_error),
    )
