"""A training plan read back, with its request and its profile, to price it again."""

from dataclasses import dataclass, replace

from moetune.domain.errors import InputError
from moetune.domain.plan import MAKE_ONE
from moetune.domain.profile import Profile
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.domain.training_document import TrainingDocument
from moetune.solve.joint.best import as_graphed
from moetune.solve.joint.placement import placed_job, placing
from moetune.workflows.models import find_planned_model
from moetune.workflows.routing_files import read_routing
from moetune.workflows.training_plan import TrainingRequest, folded_layout, plan_id


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTraining:
    """A plan of a training, and what it was made from.

    Args:
        priced: the request as the layouts are priced: with the plan's CUDA graphs, and with placed
            experts where it has them.
        layouts: the chosen one, then those that it was compared with.
    """

    plan: TrainingDocument
    request: TrainingRequest
    priced: TrainingRequest
    profile: Profile
    layouts: tuple[FoldedLayout, ...]


def read_planned_training(
    plan: TrainingDocument, *, profile: Profile, model: str | None
) -> PlannedTraining:
    """Return a plan with its request.

    Args:
        profile: the one that the plan was made with.
        model: the configuration that the plan was made for; None for the model of its name.

    Raises:
        InputError: its model or routing is another one.
    """
    inputs, name = plan.inputs, f"plan {plan.id[:6]}"
    decoder = find_planned_model(inputs, given=model).decoder
    if decoder is None:
        raise InputError(f"{name}: {inputs.model} is a layer, not a model", MAKE_ONE)
    decoder, routing = read_routing(inputs.routing, decoder)
    request = TrainingRequest(
        job=TrainingJob(
            decoder=decoder, world_size=inputs.world_size, global_batch=inputs.global_batch,
            length=inputs.seq, dtype=inputs.dtype,
            routing=routing, optimizer=inputs.optimizer, leaves_room=inputs.leaves_room,
        ),
        pins=inputs.pins,
        target=inputs.facts,
        memory_limit_bytes=inputs.memory_limit_bytes,
    )  # fmt: skip
    _check_id(plan, request)
    folded = tuple(folded_layout(one.layout) for one in (plan.best, *plan.alternatives))
    return PlannedTraining(
        plan=plan,
        request=request,
        priced=_priced(plan, replace(request, pins=as_graphed(request.pins, folded[0]))),
        profile=profile,
        layouts=folded,
    )


def _priced(plan: TrainingDocument, request: TrainingRequest) -> TrainingRequest:
    """Return the request with experts as the plan places them."""
    if plan.placement is None or not plan.is_placed:
        return request
    return replace(request, job=placed_job(request.job), target=placing(request.target))


def _check_id(document: TrainingDocument, request: TrainingRequest) -> None:
    """Raise InputError where the request is not the one that the plan's id is of."""
    if plan_id(document.inputs, request) != document.id:
        raise InputError(
            f"plan {document.id[:6]}: its model, routing or version of moetune is another one",
            "make the plan again; where its model is a config.json, name it with --model",
        )
