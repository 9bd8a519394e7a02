"""What `make quickstart` says of a cluster: two models on 64 H100, from published numbers."""

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.app.training import plan_training
from moetune.app.training_plan import TrainingRequest
from moetune.cli.render import Screen
from moetune.domain.targets import find_target
from moetune.domain.training import LayoutRequest, TrainingJob
from moetune.domain.training_document import TrainingDocument
from moetune.domain.units import format_share
from moetune.huggingface.registry import named_model
from moetune.report.section import Cell, Table

_MACHINE, RANKS = "h100-x8", 64
MODELS = ("mixtral-8x7b", "qwen3-30b-a3b")
_BATCH, _LENGTH = 1024, 4096


def show_cluster(screen: Screen) -> None:
    """Print the plans and the commands that make them."""
    profile = load_profile_file(bundled_profiles()[_MACHINE])
    rows = []
    for name in MODELS:
        job = TrainingJob(
            decoder=named_model(name).decoder, world_size=RANKS, global_batch=_BATCH,
            length=_LENGTH,
        )  # fmt: skip
        request = TrainingRequest(job=job, pins=LayoutRequest(), target=find_target("moetune"))
        rows.append(_row(plan_training(request, profile)))
    header = ("model", "layout", "step", "tokens per second and GPU", "chunks save")
    screen.table(Table(name="cluster", header=header, rows=tuple(rows)))
    screen.say()
    screen.say("Published numbers, not measured here. Each is one command:")
    for name in MODELS:
        screen.line(
            f"  .venv/bin/moetune plan --model {name} --profile {_MACHINE} \\\n"
            f"    --world-size {RANKS} --global-batch {_BATCH} --seq 4k"
        )


def _row(plan: TrainingDocument) -> tuple[Cell, ...]:
    predicted = plan.predicted
    per_gpu = predicted.tokens_per_second_per_device
    hidden = predicted.saved_by_overlap_seconds
    saved = hidden / (predicted.step_seconds + hidden)
    return (
        Cell.words(plan.inputs.model),
        Cell.words(plan.layout.words),
        Cell.seconds(predicted.step_seconds),
        Cell(text=f"{per_gpu:,.0f}", value=per_gpu),
        Cell(text=format_share(saved), value=saved),
    )
