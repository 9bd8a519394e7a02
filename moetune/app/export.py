"""Export of a training plan as the configuration of its runtime, with warnings."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from moetune.app.profiles import find_profile
from moetune.app.training_plan import planned_job
from moetune.app.wiring import StoreFinder
from moetune.domain.errors import InputError, ProfileError
from moetune.domain.site import Site, site_of
from moetune.domain.targets import Target, TargetName, find_target
from moetune.domain.training_document import TrainingDocument
from moetune.domain.units import format_bytes, format_seconds
from moetune.export import export_layout
from moetune.export.planned import Planned
from moetune.huggingface.reader import language_model

_HUB_NAME = re.compile(r"\bof (\S+/\S+) on Hugging Face")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportDocument:
    """The JSON document of `moetune export`.

    Args:
        plan: its id.
        version: version of the runtime that reads these keys.
        text, file_name, launch, not_expressed: see `Export`.
    """

    schema: Literal["moetune.export/1"] = "moetune.export/1"
    plan: str
    target: TargetName
    version: str
    file_name: str
    text: str
    launch: str
    not_expressed: tuple[str, ...]


def export_plan(
    plan: TrainingDocument, *, to: str, model: str | None, stores: StoreFinder
) -> ExportDocument:
    """Return the runtime's configuration for a training plan.

    Args:
        to: the target's name, with a version or without: "megatron@0.16". The default is the plan's
            version if the plan is for that runtime, else the newest.
        model: the `config.json` of the plan's model, if the model has no name in the list.

    Raises:
        InputError: the target is unknown, or `model` is not the plan's model.
        InfeasiblePlanError: the target cannot run the layout.
    """
    inputs, name = plan.inputs, f"plan {plan.id[:6]}"
    target = inputs.facts if to == inputs.target else find_target(to)
    registered, job = planned_job(plan, given=model)
    if job.decoder.name != inputs.model:
        raise InputError(
            f"{name} is a plan of {inputs.model}, not of {job.decoder.name}",
            "omit --model, or name the configuration that the plan was made for",
        )
    site: Site | None = None
    with suppress(InputError, ProfileError):
        site = site_of(find_profile(inputs.profile, stores=stores).profile)
    planned = Planned(
        plan_id=plan.id,
        job=job,
        layout=plan.layout,
        target=target,
        hub_name=hub[1] if (hub := _HUB_NAME.search(registered.source)) else None,
        site=site,
        predicted=(
            f"{format_seconds(plan.step_seconds)} a step, "
            f"{format_bytes(plan.memory.peak_bytes)} a device"
        ),
        config=language_model(registered.config)[0],
        warnings=tuple(_warnings(plan, target)),
    )
    made = export_layout(planned)
    return ExportDocument(
        plan=plan.id, target=target.name, version=target.version, file_name=made.file_name,
        text=made.text, launch=made.launch, not_expressed=made.not_expressed,
    )  # fmt: skip


def _warnings(plan: TrainingDocument, target: Target) -> Iterator[str]:
    planned_for = plan.inputs.facts
    if planned_for != target:
        yield f"Planned for {planned_for.spec}: the predicted times are not {target.spec}'s."
    if not plan.fits:
        yield "The plan does not fit into the memory that it was made for."
    if plan.is_placed:
        yield (
            "The plan places experts by their loads, as moetune.parallelize does and this export "
            "does not: in the model's order the step takes longer."
        )
