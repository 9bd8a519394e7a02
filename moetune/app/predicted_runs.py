"""The prediction of a run, from the plan that it was started with or from its launch file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moetune.app.check import check_file
from moetune.app.launch_check import Checked
from moetune.app.planner import Planner
from moetune.app.subjects.values import is_same_step
from moetune.app.training_plan import planned_job
from moetune.domain.any_plan import is_plan_text
from moetune.domain.architecture import Decoder
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.records import Calibration, ObservedRun, factor_of
from moetune.domain.targets import Target
from moetune.domain.training import FoldedLayout
from moetune.domain.training_document import TrainingAnswer, TrainingDocument
from moetune.launches.files import launch_text
from moetune.launches.reading import LARGEST_BYTES, Asked
from moetune.solve.model.uncertainty import confidence_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRun:
    """A run's predicted step and memory.

    Args:
        run: the run as it would be observed if all were as predicted. Nine in ten such steps lie
            between its low and high seconds; its source is the plan's or the launch's name.
        sizes: sizes of the job and the layout, by the names that a log has for them.
        is_current: whether new plans are predicted with the same profile.
        notes: remarks that a reader of the prediction has to know.
    """

    run: ObservedRun
    target: Target
    answer: TrainingAnswer
    memory_limit_bytes: int
    calibration: Calibration | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    is_current: bool = True
    notes: tuple[str, ...] = ()


def predicted_run(planner: Planner, wanted: str, asked: Asked) -> PredictedRun:
    """Return the prediction for a run of a plan or of a launch file.

    Args:
        wanted: a plan's file, the beginning of its id, or a launch file.
        asked: answers to a launch file's open questions; a plan takes only `model`, the
            `config.json` of its model.

    Raises:
        InputError: there is no such plan or file, the plan is of a layer, or a launch has no price.
        ProfileError: the profile of a launch is missing, or lacks an operation.
    """
    path = Path(wanted).expanduser()
    if _is_launch(path):
        return of_check(check_file(planner, path, launch_text(path), asked))
    plan = planner.sources.plan(wanted).as_model()
    of_launches = {
        "--world-size": asked.world_size, "--target": asked.target, "--set": asked.values,
        "words behind --": asked.extra,
    }  # fmt: skip
    for name, value in of_launches.items():
        if value:
            raise InputError(f"{name} is for launch files, and {wanted} is a plan", f"omit {name}")
    return of_plan(planner, plan, model=asked.model)


def of_plan(planner: Planner, plan: TrainingDocument, *, model: str | None) -> PredictedRun:
    """Return a plan's prediction; `model` is the `config.json` of a model without a name."""
    inputs, origin, notes = plan.inputs, plan.origin, []
    seconds = plan.step_seconds / plan.factor
    subject = planner.explain(plan, model=model)
    is_current = subject.profile is not None
    if not is_current:
        notes.append(f"{subject.missing}: the run calibrates no plan that is made now")
    else:
        try:
            now = planner.run(inputs.profile, subject.seconds) / plan.factor
        except MoetuneError as error:
            notes.append(f"the plan cannot be priced again: {error.what}")
        else:
            if not is_same_step(now, seconds):
                notes.append(
                    "this version of moetune predicts another step, by which it calibrates"
                )
            seconds = now
    try:
        decoder: Decoder | None = planned_job(plan, given=model)[1].decoder
    except MoetuneError:  # then the model's sizes are not compared
        decoder = None
    low, high = plan.range_seconds
    run = ObservedRun(
        source=f"plan {plan.id[:6]}", plan_id=plan.id, model=inputs.model, profile=inputs.profile,
        profile_fingerprint=inputs.profile_fingerprint, device=origin.device if origin else "",
        target=inputs.target, target_version=inputs.target_version, world_size=inputs.world_size,
        global_batch=inputs.global_batch, seq=inputs.seq, dtype=inputs.dtype,
        layout=plan.layout.all_words, seconds=plan.step_seconds, low_seconds=low, high_seconds=high,
        num_steps=0, predicted_seconds=seconds,
    )  # fmt: skip
    return PredictedRun(
        run=run, target=inputs.facts, answer=plan.best,
        memory_limit_bytes=inputs.memory_limit_bytes, calibration=plan.calibration,
        sizes=_sizes(run, plan.layout, decoder),
        is_current=is_current, notes=tuple(notes),
    )  # fmt: skip


def of_check(checked: Checked) -> PredictedRun:
    """Return the prediction of a checked launch; raise InputError if it has no price."""
    reading, answer = checked.reading, checked.answer
    if answer is None:
        stops = next(iter(checked.problems))
        raise InputError(
            f"{checked.file} has no prediction: {stops.what}",
            "`moetune check` says more; give the file that the run was really started with",
        )
    job, target, calibration = reading.job, reading.target, checked.calibration
    seconds = answer.predicted.step_seconds / factor_of(calibration)
    sure = confidence_of([seconds], target=target.name, calibration=calibration)
    run = ObservedRun(
        source=checked.file, plan_id="", model=reading.decoder.name, profile=checked.profile.name,
        profile_fingerprint=checked.profile.digest, device=checked.profile.machine.device,
        target=target.name, target_version=target.number, world_size=job.world_size,
        global_batch=job.global_batch, seq=job.length, dtype=job.dtype,
        layout=answer.layout.all_words, seconds=answer.predicted.step_seconds,
        low_seconds=sure.p05_step_seconds, high_seconds=sure.p95_step_seconds, num_steps=0,
        predicted_seconds=seconds,
    )  # fmt: skip
    return PredictedRun(
        run=run, target=target, answer=answer, memory_limit_bytes=checked.limit_bytes,
        calibration=calibration, sizes=_sizes(run, reading.layout, reading.decoder),
    )  # fmt: skip


def _sizes(run: ObservedRun, layout: FoldedLayout, decoder: Decoder | None) -> dict[str, int]:
    sizes = {
        "world_size": run.world_size, "global_batch": run.global_batch, "length": run.seq,
        "tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep,
    }  # fmt: skip
    if decoder is None:
        return sizes
    sizes["d_model"] = decoder.d_model
    experts = {kind.num_experts for kind in decoder.routed_kinds if kind is not None}
    if len(experts) == 1:
        sizes["num_experts"] = experts.pop()
    if not decoder.has_mamba:  # Megatron counts a hybrid's mixers and networks as layers
        sizes["num_layers"] = decoder.num_layers
    return sizes


def _is_launch(path: Path) -> bool:
    if not path.is_file() or path.suffix != ".json":
        return path.is_file()
    return path.stat().st_size <= LARGEST_BYTES and not is_plan_text(launch_text(path))
