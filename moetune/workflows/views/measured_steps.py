"""Whole steps of a profile beside what its operations say of them."""

from collections.abc import Iterator

from moetune.domain.profile import Profile
from moetune.domain.records import prediction_error
from moetune.domain.samples import StepRecord
from moetune.report.section import Cell, Section, Table


def measured_steps(profile: Profile) -> Iterator[Section]:
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
