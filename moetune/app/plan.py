"""A layer's plan from a question and a profile, and questions from untrusted JSON documents."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import make_dataclass, replace
from typing import Any, get_type_hints

from moetune.app.profiles import is_path
from moetune.domain.ask import LARGEST_DEGREE
from moetune.domain.chips import peak_flops
from moetune.domain.constraints import Constraints
from moetune.domain.costs import Refit
from moetune.domain.document import decode, encode, shown
from moetune.domain.errors import InputError, ProfileError
from moetune.domain.layer import layer_flops, rate
from moetune.domain.layout import Layout
from moetune.domain.model import find_model
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.question import Question, read_question
from moetune.domain.request import (
    PlanInputs,
    answers_of,
    constraints_of,
    decode_constraints,
    default_dtype,
    encode_constraints,
)
from moetune.domain.spelling import about
from moetune.domain.units import dtype_bytes, full_dtype, parse_bytes
from moetune.fit.costs import costs_of
from moetune.fit.missing import launcher
from moetune.fit.quality import quality_of
from moetune.fit.variants import NUM_RESAMPLES, RESAMPLING_SEED, resample_costs
from moetune.report.reasons import in_words
from moetune.solve.layer.kernels import MeasuredKernels
from moetune.solve.layer.placed import solve_placed
from moetune.solve.layer.plan import LayerProblem

LONGEST_NAME = 200
SentInputs: type[Any] = make_dataclass(
    "SentInputs", [(name, kind | None, None) for name, kind in get_type_hints(PlanInputs).items()],
    frozen=True, kw_only=True,
)  # fmt: skip
"""A request for a layer's plan by keys of its inputs; None for a key that takes its default."""


def ranks_of(question: Question, profile: Profile) -> int:
    """Return the question's number of ranks, else all devices of the profile."""
    on_nodes = profile.machine.devices_per_node * (question.nodes or 0)
    return question.world_size or on_nodes or profile.machine.num_devices


def check_layer(question: Question) -> None:
    """Raise InputError if a layer's question is incomplete or contradicts itself."""
    if question.model is not None:
        find_model(question.model)
    elif question.layer is None:
        raise InputError(
            "there is nothing to plan for",
            "name a model with --model (see `moetune models list`), "
            "or give a layer with --d-model, --d-hidden and --num-experts",
        )
    elif question.tokens_per_rank is None:
        raise InputError("the number of tokens is missing", "give --tokens")
    if question.dtype is not None:
        with about("dtype"):
            dtype_bytes(full_dtype(question.dtype))
    constraints_of(question)


def layer_inputs(question: Question, profile: Profile) -> PlanInputs:
    """Return the inputs of a layer's plan with every default; errors: see `check_layer`."""
    check_layer(question)
    world_size = ranks_of(question, profile)
    layer, tokens = question.layer, question.tokens_per_rank
    if question.model is not None:
        model = find_model(question.model)
        layer, tokens = model.layer(world_size), tokens or model.tokens_per_rank
    assert layer is not None  # noqa: S101 - as checked
    assert tokens is not None  # noqa: S101
    return PlanInputs(
        model=question.model, layer=layer, world_size=world_size, tokens_per_rank=tokens,
        dtype=full_dtype(question.dtype) if question.dtype else default_dtype(profile),
        memory_limit_bytes=question.memory_limit,
        profile=profile.name, profile_fingerprint=profile.digest,
        constraints=encode_constraints(constraints_of(question)),
    )  # fmt: skip


def layer_answers(inputs: PlanInputs, pinned: Constraints) -> dict[str, object]:
    """Return the fields of a layer's question from its plan's inputs or from `SentInputs`."""
    return {
        **({"model": inputs.model} if inputs.model is not None else encode(inputs.layer) or {}),
        "world_size": inputs.world_size, "tokens": inputs.tokens_per_rank, "dtype": inputs.dtype,
        "memory_limit": inputs.memory_limit_bytes, **answers_of(pinned),
    }  # fmt: skip


def answers_again(inputs: PlanInputs) -> dict[str, object]:
    """Return the fields of an older plan's question; a degree bound above today's is lowered."""
    pinned = inputs.pinned
    largest = min(pinned.bounds.max_degree, LARGEST_DEGREE)
    return layer_answers(inputs, replace(pinned, bounds=replace(pinned.bounds, max_degree=largest)))


def changed_question(inputs: PlanInputs, changes: Mapping[str, object]) -> Question:
    """Return a layer plan's question with changed answers; raise InputError for a wrong answer."""
    return read_question({**answers_again(inputs), **changes})


def check_fingerprint(profile: Profile, sent: str | None) -> None:
    """Raise InputError if the profile has changed since the fingerprint that a request names."""
    if sent not in (None, profile.digest):
        raise InputError(
            f"profile {profile.name!r} has the fingerprint {profile.digest[:12]}, "
            f"not {str(sent)[:12]!r}",
            "it was measured or imported again: omit profile_fingerprint to use it",
        )


def profile_name(profile: object) -> str:
    """Return a request's profile name; raise InputError if it is a path or not a name."""
    if not isinstance(profile, str) or not profile or is_path(profile):
        raise InputError(
            f"profile must be a name, got {shown(profile)}",
            "import the file first: only stored profiles can be planned with here",
            field="profile",
        )
    return profile


def read_inputs(document: object) -> tuple[Question, Any]:
    """Return a request's question and its decoded keys; raise InputError that names a wrong key."""
    key = "memory_limit_bytes"
    if isinstance(document, Mapping) and isinstance(text := document.get(key), str):
        with about("memory_limit"):
            document = {**document, key: parse_bytes(text)}
    sent = decode(SentInputs, document, "inputs")
    for name in ("model", "profile", "profile_fingerprint", "dtype"):
        if len(getattr(sent, name) or "") > LONGEST_NAME:
            raise InputError(f"{name} is longer than {LONGEST_NAME} characters")
    if sent.profile is not None:
        profile_name(sent.profile)
    question = read_question(layer_answers(sent, decode_constraints(sent.constraints or {})))
    check_layer(question)
    return question, sent


def inputs_sent(question: Question, sent: Any, profile: Profile) -> PlanInputs:  # noqa: ANN401
    """Return sent inputs with every default; raise InputError for another layer or machine."""
    inputs = layer_inputs(question, profile)
    if sent.layer not in (None, inputs.layer):
        raise InputError(
            f"layer is not that of model {inputs.model} on {inputs.world_size} ranks",
            "give the model or the layer, not both",
        )
    check_fingerprint(profile, sent.profile_fingerprint)
    return inputs


def make_plan(question: Question, *, profile: Profile) -> Plan:
    """Return the best plan of a layer on the profile's machine.

    Raises:
        InputError: the experts do not divide by the ranks, or the dtype is unknown.
        InfeasiblePlanError: nothing satisfies the constraints or the memory limit.
        ProfileError: the profile lacks an operation that the layer needs.
    """
    return plan_for(layer_inputs(question, profile), profile)


def plan_for(inputs: PlanInputs, profile: Profile) -> Plan:
    """Return the best plan for complete inputs, with terms and FLOP/s; errors: see `make_plan`."""
    plan = in_words(solve_placed(_problem(inputs, profile)))
    predicted = plan.predicted
    peak = peak_flops(profile.machine.device, plan.workload.dtype)
    if (speed := rate(layer_flops(plan.workload), predicted.step_seconds, peak)) is not None:
        predicted = replace(
            predicted, model_flops_per_second_per_device=speed.flops_per_second, mfu=speed.mfu
        )
    return replace(plan, predicted=predicted, profile_quality=quality_of(profile))


def plan_again(question: Question, profile: Profile) -> Plan:
    """Return the best plan; estimate what was not measured if needed; errors: see `make_plan`."""
    try:
        return make_plan(question, profile=profile)
    except ProfileError:
        if question.allow_modelled:
            raise
        with suppress(ProfileError):
            return make_plan(replace(question, allow_modelled=True), profile=profile)
        raise


@contextmanager
def sound_numbers(profile: str) -> Iterator[None]:
    """Turn arithmetic errors into a ProfileError, as an untrusted profile may have any numbers."""
    try:
        yield
    except (ArithmeticError, ValueError) as error:
        raise ProfileError(
            f"profile {profile!r} has numbers that cannot be computed with: {error}",
            "look at it with `moetune profiles show`, and measure it again",
        ) from error


def _problem(inputs: PlanInputs, profile: Profile) -> LayerProblem:
    constraints = inputs.pinned
    workload = inputs.workload(Layout.of_layer(inputs.expert_parallel, inputs.world_size))
    return LayerProblem(
        inputs=inputs,
        costs=costs_of(profile, allow_modelled=constraints.allow_modelled),
        resamples=drawn_costs(profile, allow_modelled=constraints.allow_modelled),
        bounds=constraints.bounds,
        device_memory_bytes=profile.machine.plannable_bytes,
        provenance=profile.provenance,
        launch=launcher((inputs.world_size, 0), profile.machine),
        kernels=MeasuredKernels(
            profile.samples, workload, kind=profile.machine.kind, pinned=constraints.expert_kernel
        ),
    )


def drawn_costs(profile: Profile, *, allow_modelled: bool) -> tuple[Refit, ...]:
    """Return the refits of resampled measurements that give a plan's confidence."""
    return resample_costs(
        profile, num=NUM_RESAMPLES, seed=RESAMPLING_SEED, allow_modelled=allow_modelled
    )
