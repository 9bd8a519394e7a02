"""The request behind a training plan's document, to price the plan again."""

from moetune.domain.errors import InputError
from moetune.domain.plan import MAKE_ONE
from moetune.domain.training import TrainingJob
from moetune.domain.training_document import TrainingDocument
from moetune.workflows.models import find_planned_model
from moetune.workflows.routing_files import read_routing
from moetune.workflows.training_plan import TrainingRequest, plan_id


def planned_request(plan: TrainingDocument, *, model: str | None) -> TrainingRequest:
    """Return what a plan was made for.

    Args:
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
    if plan_id(inputs, request) != plan.id:
        raise InputError(
            f"{name}: its model, routing or version of moetune is another one",
            "make the plan again; where its model is a config.json, name it with --model",
        )
    return request
