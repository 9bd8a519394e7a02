"""Plans from a request and a profile, and requests read from untrusted JSON documents."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

from moetune.app.profiles import is_path
from moetune.domain.chips import peak_flops
from moetune.domain.constraints import Constraints
from moetune.domain.costs import Refit
from moetune.domain.document import decode, encode, shown
from moetune.domain.errors import InputError, ProfileError
from moetune.domain.layer import LayerShape, layer_flops, rate
from moetune.domain.layout import Layout
from moetune.domain.model import find_model
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.question import Question
from moetune.domain.request import (
    PlanInputs,
    check_pins,
    constraint_values,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A request for a layer's plan, by the keys of a plan's inputs; None takes the default.

    Args:
        model: a name of `moetune models list`.
        layer: needed without a model; with one it has to be the model's on these ranks.
        tokens_per_rank: default, the model's; a layer needs it.
        dtype: default, what the profile is for: see `default_dtype`.
        constraints: names and values as in a plan's `inputs.constraints`.

    Raises:
        InputError: an unknown dtype, a name that is too long, or a profile that is a path.
    """

    model: str | None = None
    layer: LayerShape | None = None
    profile: str | None = None
    profile_fingerprint: str | None = None
    world_size: int | None = None
    tokens_per_rank: int | None = None
    dtype: str | None = None
    memory_limit_bytes: int | None = None
    constraints: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("model", "profile", "profile_fingerprint", "dtype"):
            if len(getattr(self, name) or "") > LONGEST_NAME:
                raise InputError(f"{name} is longer than {LONGEST_NAME} characters")
        if self.profile is not None:
            profile_name(self.profile)
        if self.dtype is not None:
            with about("dtype"):
                dtype_bytes(full_dtype(self.dtype))

    @property
    def pinned(self) -> Constraints:
        """The constraints, typed."""
        return decode_constraints(self.constraints)

    def check(self) -> None:
        """Raise InputError where it is incomplete, contradicts itself, or has a wrong value."""
        if self.model is not None:
            find_model(self.model)
        elif self.layer is None:
            raise InputError(
                "there is nothing to plan for",
                "name a model with --model (see `moetune models list`), "
                "or give a layer with --d-model, --d-hidden and --num-experts",
            )
        elif self.tokens_per_rank is None:
            raise InputError("the number of tokens is missing", "give --tokens")
        self.check_numbers()
        check_pins(self.pinned)

    def check_numbers(self) -> None:
        """Raise InputError where a number is out of its range, as those of older plans may be."""
        pinned = {flag.replace("-", "_"): value for flag, value in constraint_values(self.pinned)}
        sizes = encode(self.layer) if self.layer is not None else {}
        Question(
            world_size=self.world_size, tokens=self.tokens_per_rank,
            memory_limit=self.memory_limit_bytes, **sizes, **cast("dict[str, Any]", pinned),
        )  # fmt: skip

    def inputs_for(self, profile: Profile) -> PlanInputs:
        """Return the inputs with every default; raise InputError for another machine or layer."""
        world_size = self.world_size or profile.machine.num_devices
        layer, tokens = self.layer, self.tokens_per_rank
        if self.model is not None:
            model = find_model(self.model)
            layer, tokens = model.layer(world_size), tokens or model.tokens_per_rank
        assert layer is not None  # noqa: S101 - as checked
        assert tokens is not None  # noqa: S101
        if self.layer not in (None, layer):
            raise InputError(
                f"layer is not that of model {self.model} on {world_size} ranks",
                "give the model or the layer, not both",
            )
        check_fingerprint(profile, self.profile_fingerprint)
        return PlanInputs(
            model=self.model, layer=layer, world_size=world_size, tokens_per_rank=tokens,
            dtype=full_dtype(self.dtype) if self.dtype else default_dtype(profile),
            memory_limit_bytes=self.memory_limit_bytes,
            profile=profile.name, profile_fingerprint=profile.digest,
            constraints=encode_constraints(self.pinned),
        )  # fmt: skip


def check_fingerprint(profile: Profile, sent: str | None) -> None:
    """Raise InputError where a request was made for a profile as it no longer is."""
    if sent not in (None, profile.digest):
        raise InputError(
            f"profile {profile.name!r} has the fingerprint {profile.digest[:12]}, "
            f"not {str(sent)[:12]!r}",
            "it was measured or imported again: omit profile_fingerprint to use it",
        )


def profile_name(profile: object) -> str:
    """Return the profile that another machine names; raise InputError for no name or a path."""
    if not isinstance(profile, str) or not profile or is_path(profile):
        raise InputError(
            f"profile must be a name, got {shown(profile)}",
            "import the file first: only stored profiles can be planned with here",
            field="profile",
        )
    return profile


def read_inputs(document: object) -> PlanRequest:
    """Return the request in a plan's inputs; raise InputError that names a wrong key."""
    return decode(PlanRequest, read_limit(document, "inputs"), "inputs")


def read_limit(document: object, where: str) -> object:
    """Return a document with its memory limit in bytes; raise InputError for a text of no size."""
    key = "memory_limit_bytes"
    if not isinstance(document, Mapping) or not isinstance(text := document.get(key), str):
        return document
    try:
        return {**document, key: parse_bytes(text)}
    except InputError as error:
        raise InputError(f"{where}.{key}: {error.what}", error.hint) from None


def make_plan(request: PlanRequest, *, profile: Profile) -> Plan:
    """Return the best plan for the request on the profile's machine.

    Raises:
        InputError: the experts do not divide by the ranks, or the dtype is unknown.
        InfeasiblePlanError: nothing satisfies the constraints or the memory limit.
        ProfileError: the profile lacks an operation that the layer needs.
    """
    return plan_for(request.inputs_for(profile), profile)


def plan_for(inputs: PlanInputs, profile: Profile) -> Plan:
    """Return the best plan for complete inputs, with terms and FLOP/s; errors as of `make_plan`."""
    plan = in_words(solve_placed(_problem(inputs, profile)))
    predicted = plan.predicted
    peak = peak_flops(profile.machine.device, plan.workload.dtype)
    if (speed := rate(layer_flops(plan.workload), predicted.step_seconds, peak)) is not None:
        predicted = replace(
            predicted, model_flops_per_second_per_device=speed.flops_per_second, mfu=speed.mfu
        )
    return replace(plan, predicted=predicted, profile_quality=quality_of(profile))


def request_of(inputs: PlanInputs) -> PlanRequest:
    """Return the request whose inputs these are, for the profile as it is now."""
    return PlanRequest(
        model=inputs.model, layer=inputs.layer if inputs.model is None else None,
        world_size=inputs.world_size, tokens_per_rank=inputs.tokens_per_rank, dtype=inputs.dtype,
        memory_limit_bytes=inputs.memory_limit_bytes, constraints=encode_constraints(inputs.pinned),
    )  # fmt: skip


def changed_request(
    inputs: PlanInputs,
    constraints: Mapping[str, str | None],
    **sizes: Any,  # noqa: ANN401 - of any field of a request
) -> PlanRequest:
    """Return the request with other texts by flag and sizes; None removes it, or is the default.

    Raises:
        InputError: a flag is unknown, or no request has these values.
    """
    request = request_of(inputs)
    texts = {**request.constraints, **constraints}
    given, remaining = (
        {flag: text for flag, text in some.items() if text is not None}
        for some in (constraints, texts)
    )
    PlanRequest(constraints=given, **sizes).check_numbers()
    changed = replace(request, constraints=remaining, **sizes)
    check_pins(changed.pinned)
    return changed


def plan_again(request: PlanRequest, profile: Profile) -> Plan:
    """Return the best plan, with estimates of what was not measured; errors as of `make_plan`."""
    try:
        return make_plan(request, profile=profile)
    except ProfileError as error:
        if request.pinned.allow_modelled:
            raise
        constraints = {**request.constraints, "allow-modelled": "true"}
        try:
            return make_plan(replace(request, constraints=constraints), profile=profile)
        except ProfileError:
            raise error from None


@contextmanager
def sound_numbers(profile: str) -> Iterator[None]:
    """Turn arithmetic errors into a ProfileError: a profile may come from anybody."""
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
    """Return the refits behind a plan's confidence."""
    return resample_costs(
        profile, num=NUM_RESAMPLES, seed=RESAMPLING_SEED, allow_modelled=allow_modelled
    )
