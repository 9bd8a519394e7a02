"""A training plan read back from its file, with its request and its profile, to price it again."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from moetune.domain.document import decode
from moetune.domain.errors import InputError, ProfileError
from moetune.domain.optimizers import OptimizerName
from moetune.domain.pipeline import read_stages
from moetune.domain.profile import Profile
from moetune.domain.targets import TargetName, find_target
from moetune.domain.training import FoldedLayout, LayoutRequest, TrainingDtype, TrainingJob
from moetune.workflows.models import find_decoder_model
from moetune.workflows.profiles import FoundProfile, find_profile, named_profile
from moetune.workflows.training import TrainingPlan, TrainingRequest, read_routing
from moetune.workflows.training_files import (
    MAKE_ONE,
    mapping_of,
    read_planned_layout,
    training_document,
)
from moetune.workflows.training_prices import StandIns
from moetune.workflows.wiring import StoreFinder


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingInputs:
    """The `inputs` of a training plan."""

    model: str
    world_size: int
    global_batch: int
    seq: int
    dtype: TrainingDtype
    profile: str
    profile_fingerprint: str
    target: TargetName
    memory_limit_bytes: int
    optimizer: OptimizerName = "adam"
    routing: str = "balanced"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTraining:
    """A plan of a training, and what it was made from.

    Args:
        layouts: the chosen one, then those that it was compared with.
    """

    document: Mapping[str, object]
    request: TrainingRequest
    profile: Profile
    layouts: tuple[FoldedLayout, ...]

    @property
    def id(self) -> str:
        """The plan's id."""
        return str(self.document.get("id", ""))


def read_planned_training(
    path: Path, *, profile: str | None, model: str | None, stores: StoreFinder
) -> PlannedTraining:
    """Return the plan in a file with its request and its profile.

    Args:
        profile: file or name of the plan's profile; None for the profile of the plan's name.
        model: the configuration that the plan was made for; None for the model of its name.

    Raises:
        InputError: the file holds no training plan, or its model or routing is another one.
        ProfileError: its profile is missing or has changed.
    """
    document = training_document(path)
    inputs, pins = _inputs(document, path)
    found = _profile(inputs, profile, str(document.get("id", "")), stores)
    decoder = find_decoder_model(model or inputs.model, world_size=inputs.world_size).decoder
    if decoder is None:
        raise InputError(f"{path}: {inputs.model} is a layer, not a model", MAKE_ONE)
    request = TrainingRequest(
        job=TrainingJob(
            decoder=decoder, world_size=inputs.world_size, global_batch=inputs.global_batch,
            length=inputs.seq, dtype=inputs.dtype, routing=read_routing(inputs.routing),
            optimizer=inputs.optimizer,
        ),
        pins=pins,
        target=find_target(inputs.target),
        memory_limit_bytes=inputs.memory_limit_bytes,
    )  # fmt: skip
    _check_id(document, request, found, path)
    others = document.get("alternatives")
    answers = [document, *(others if isinstance(others, list) else ())]
    return PlannedTraining(
        document=document,
        request=request,
        profile=found.profile,
        layouts=tuple(
            read_planned_layout(mapping_of(one, "layout", path), path) for one in answers
        ),
    )


def _inputs(document: Mapping[str, object], path: Path) -> tuple[TrainingInputs, LayoutRequest]:
    given = mapping_of(document, "inputs", path)
    pins = mapping_of(given, "pins", path)
    if isinstance(pins.get("stages"), str):
        pins["stages"] = list(read_stages(str(pins["stages"])))
    known = {item.name for item in fields(TrainingInputs)}
    inputs = decode(
        TrainingInputs, {key: one for key, one in given.items() if key in known}, f"{path}: inputs"
    )
    return inputs, decode(LayoutRequest, pins, f"{path}: pins")


def _profile(
    inputs: TrainingInputs, wanted: str | None, plan_id: str, stores: StoreFinder
) -> FoundProfile:
    if wanted is None:
        with stores() as store:
            found = named_profile(inputs.profile, store=store)
    else:
        found = find_profile(wanted, stores=stores)
    if found.digest != inputs.profile_fingerprint:
        raise ProfileError(
            f"profile {found.profile.name!r} is not the one that plan {plan_id[:6]} was made with, "
            "or has changed since",
            "make the plan again, or name its own profile with --profile",
        )
    return found


def _check_id(
    document: Mapping[str, object], request: TrainingRequest, found: FoundProfile, path: Path
) -> None:
    """Raise InputError where the request is not the one that the plan's id is of."""
    plan = TrainingPlan(
        request=request, profile=found.profile.name, profile_fingerprint=found.digest,
        limit_bytes=request.memory_limit_bytes or found.profile.machine.plannable_bytes,
        trust="modelled", found=(), stand_ins=StandIns(),
    )  # fmt: skip
    if plan.id != document.get("id"):
        raise InputError(
            f"{path}: the plan's model, routing or version of moetune is another one",
            "make the plan again; where its model is a config.json, name it with --model",
        )
