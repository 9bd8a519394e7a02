"""Plans from a request and a profile, and requests read from untrusted JSON documents.

`Planner` calls both: `read_inputs` for what a program sends, `make_plan` to solve.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from moetune.app.profile_quality import quality_of
from moetune.app.profiles import is_path
from moetune.domain.chips import peak_flops
from moetune.domain.costs import Costs
from moetune.domain.document import decode, shown
from moetune.domain.errors import InputError, ProfileError
from moetune.domain.layer import LayerShape, layer_flops, rate
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.request import (
    PlanInputs,
    PlanRequest,
    check_sizes,
    decode_constraints,
    recorded_constraints,
)
from moetune.domain.spelling import about
from moetune.domain.units import dtype_bytes, full_dtype, parse_bytes
from moetune.fit.costs import costs_of
from moetune.fit.missing import launcher
from moetune.fit.variants import NUM_RESAMPLES, RESAMPLING_SEED, resample_costs
from moetune.solve.layer.placed import solve_placed
from moetune.solve.layer.plan import LayerProblem

LONGEST_NAME = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class InputsDocument:
    """A plan's inputs as a program sends them; None takes the default.

    Args:
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

    def request(self, *, default_dtype: str | None) -> PlanRequest:
        """Return the request; `check_sizes` limits its numbers later.

        Args:
            default_dtype: where the document has none; None for the profile's own.

        Raises:
            InputError: the keys contradict each other, or a value is unknown or out of range.
        """
        return PlanRequest(
            model=self.model,
            layer=self.layer if self.model is None else None,
            world_size=self.world_size,
            tokens_per_rank=self.tokens_per_rank,
            dtype=full_dtype(self.dtype) if self.dtype else default_dtype,
            memory_limit_bytes=self.memory_limit_bytes,
            constraints=decode_constraints(self.constraints),
        )

    def check(self, inputs: PlanInputs) -> None:
        """Compare the completed inputs with what was sent.

        Raises:
            InputError: the fingerprint or the layer is another one.
        """
        sent = self.profile_fingerprint
        if sent is not None and sent != inputs.profile_fingerprint:
            raise InputError(
                f"profile {inputs.profile!r} has the fingerprint "
                f"{inputs.profile_fingerprint[:12]}, not {sent[:12]!r}",
                "it was measured or imported again: omit profile_fingerprint to use it",
            )
        if self.layer is not None and self.layer != inputs.layer:
            raise InputError(
                f"layer is not that of model {self.model} on {inputs.world_size} ranks",
                "give the model or the layer, not both",
            )


def profile_name(profile: object) -> str:
    """Return the profile that another machine names.

    Raises:
        InputError: it is no name, or the path of a file.
    """
    if not isinstance(profile, str) or not profile or is_path(profile):
        raise InputError(
            f"profile must be a name, got {shown(profile)}",
            "import the file first: only stored profiles can be planned with here",
            field="profile",
        )
    return profile


def read_inputs(document: object) -> InputsDocument:
    """Return the inputs in a document's plain values.

    Raises:
        InputError: a key is unknown, or a value wrong; the message names the key.
    """
    return decode(InputsDocument, read_limit(document, "inputs"), "inputs")


def read_limit(document: object, where: str) -> object:
    """Return a document whose memory limit is a number of bytes: a text such as "80GB" is read.

    Raises:
        InputError: the text is no size with a unit; the message names the key.
    """
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
    """Return the best plan for complete inputs, with its terms and FLOP/s.

    Raises:
        InputError, InfeasiblePlanError, ProfileError: as of `make_plan`.
    """
    plan = solve_placed(_problem(inputs, profile))
    predicted = plan.predicted
    peak = peak_flops(profile.machine.device, plan.workload.dtype)
    if (speed := rate(layer_flops(plan.workload), predicted.step_seconds, peak)) is not None:
        predicted = replace(
            predicted, model_flops_per_second_per_device=speed.flops_per_second, mfu=speed.mfu
        )
    return replace(plan, predicted=predicted, profile_quality=quality_of(profile))


def changed_request(
    inputs: PlanInputs,
    constraints: Mapping[str, str | None],
    **sizes: Any,  # noqa: ANN401 - of any field of a request
) -> PlanRequest:
    """Return the request of a plan's inputs with other constraints and sizes.

    Args:
        constraints: texts by flag; None removes one.
        sizes: fields of the request; None for the default.

    Raises:
        InputError: a flag is unknown, or no request has these values.
    """
    given = {flag: text for flag, text in constraints.items() if text is not None}
    check_sizes(decode_constraints(given))
    texts = {**inputs.constraints, **constraints}
    remaining = {flag: text for flag, text in texts.items() if text is not None}
    return replace(inputs.request, constraints=recorded_constraints(remaining), **sizes)


def plan_again(request: PlanRequest, profile: Profile) -> Plan:
    """Return the best plan; where an operation was not measured, an estimate stands in.

    Raises:
        InputError, InfeasiblePlanError, ProfileError: as `make_plan`.
    """
    try:
        return make_plan(request, profile=profile)
    except ProfileError as error:
        if request.constraints.allow_modelled:
            raise
        constraints = replace(request.constraints, allow_modelled=True)
        try:
            return make_plan(replace(request, constraints=constraints), profile=profile)
        except ProfileError:
            raise error from None


@contextmanager
def sound_numbers(profile: str) -> Iterator[None]:
    """Turn arithmetic errors into a ProfileError: a profile may come from anybody.

    Raises:
        ProfileError: something overflowed, or was not a number.
    """
    try:
        yield
    except (ArithmeticError, ValueError) as error:
        raise ProfileError(
            f"profile {profile!r} has numbers that cannot be computed with: {error}",
            "look at it with `moetune profiles show`, and measure it again",
        ) from error


def _problem(inputs: PlanInputs, profile: Profile) -> LayerProblem:
    constraints = inputs.pinned
    return LayerProblem(
        inputs=inputs,
        costs=costs_of(profile, allow_modelled=constraints.allow_modelled),
        resamples=drawn_costs(profile, allow_modelled=constraints.allow_modelled),
        bounds=constraints.bounds,
        device_memory_bytes=profile.machine.plannable_bytes,
        provenance=profile.provenance,
        launch=launcher((inputs.world_size, 0), profile.machine),
    )


def drawn_costs(profile: Profile, *, allow_modelled: bool) -> tuple[Costs, ...]:
    """Return the refits behind a plan's confidence."""
    return resample_costs(
        profile, num=NUM_RESAMPLES, seed=RESAMPLING_SEED, allow_modelled=allow_modelled
    )
