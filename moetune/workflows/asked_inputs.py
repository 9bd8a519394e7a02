"""A question as a plan's `inputs` ask it: a document from elsewhere, read with every doubt.

Of its keys only `model` or `layer` is required. A plan's own inputs, with all of them, ask for
the same plan again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from moetune.domain.document import decode, shown
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape
from moetune.domain.plan_inputs import PlanInputs
from moetune.domain.profile import Profile
from moetune.domain.units import dtype_bytes
from moetune.workflows.asked_constraints import read_constraints
from moetune.workflows.plan import PlanRequest, plan_inputs
from moetune.workflows.profiles import is_path

WHERE = "inputs"
LONGEST_NAME = 200
LARGEST_RANKS = 2**20
LARGEST_TOKENS = 2**31
LARGEST_BYTES = 2**50
LARGEST_WIDTH = 2**20
"""Of a layer: its sizes and its experts. Larger ones are mistakes, and take long to refuse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedInputs:
    """The document, checked key by key; None for what it leaves open.

    Args:
        constraints: names and values as plans carry them.

    Raises:
        InputError: a number out of range, an unknown dtype, or a name that is none.
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
        _check("world_size", self.world_size, LARGEST_RANKS)
        _check("tokens_per_rank", self.tokens_per_rank, LARGEST_TOKENS)
        _check("memory_limit_bytes", self.memory_limit_bytes, LARGEST_BYTES)
        for size in ("d_model", "d_hidden", "num_experts", "top_k") if self.layer else ():
            _check(f"layer.{size}", getattr(self.layer, size), LARGEST_WIDTH)
        for name in ("model", "profile", "profile_fingerprint", "dtype"):
            if len(getattr(self, name) or "") > LONGEST_NAME:
                raise InputError(f"{name} is longer than {LONGEST_NAME} characters")
        if self.profile is not None and (not self.profile or is_path(self.profile)):
            raise InputError(
                f"profile must be a name, got {shown(self.profile)}",
                "only profiles that are kept here can be planned with: import the file first",
            )
        if self.dtype is not None:
            dtype_bytes(self.dtype)

    def request(self, *, default_dtype: str | None) -> PlanRequest:
        """Return what to plan for.

        Args:
            default_dtype: where none is asked for; None for the profile's own.

        Raises:
            InputError: the keys contradict each other or name what there is not.
        """
        pinned = read_constraints(self.constraints, f"{WHERE}.constraints")
        return PlanRequest(
            model=self.model,
            layer=self.layer if self.model is None else None,
            transformer=pinned.transformer(model=self.model, layer=self.layer),
            pins=pinned.pins,
            sequence_parallel=pinned.sequence_parallel,
            world_size=self.world_size,
            tokens_per_rank=self.tokens_per_rank,
            dtype=self.dtype or default_dtype,
            memory_limit_bytes=self.memory_limit_bytes,
            memory_taken_bytes=pinned.memory_taken_bytes,
            bounds=pinned.bounds,
            allow_modelled=pinned.allow_modelled,
        )

    def check(self, inputs: PlanInputs) -> None:
        """Raise InputError where what was asked for is not what the plan would be made from."""
        asked = self.profile_fingerprint
        if asked is not None and asked != inputs.profile_fingerprint:
            raise InputError(
                f"profile {inputs.profile!r} has the fingerprint "
                f"{inputs.profile_fingerprint[:12]}, asked was {asked[:12]!r}",
                "it was measured or imported anew: leave profile_fingerprint away to take it",
            )
        if self.layer is not None and self.layer != inputs.layer:
            raise InputError(
                f"layer is not that of model {self.model} on {inputs.world_size} ranks",
                "give the model or the layer, not both",
            )


def read_inputs(document: object) -> AskedInputs:
    """Return the question in a document's plain values.

    Raises:
        InputError: a key is unknown, or a value wrong; the text names the key.
    """
    return decode(AskedInputs, document, WHERE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to plan for, with every default filled in, and the profile to plan with."""

    request: PlanRequest
    inputs: PlanInputs
    profile: Profile


def question_of(
    asked: AskedInputs, *, profile: Profile, fingerprint: str, default_dtype: str | None
) -> Question:
    """Return the question to this profile.

    Args:
        fingerprint: the profile's digest, which takes long to work out.
        default_dtype: where none is asked for; None for the profile's own.

    Raises:
        InputError: the keys contradict each other, or the profile is not the one asked for.
    """
    request = asked.request(default_dtype=default_dtype)
    inputs = plan_inputs(request, profile=profile, fingerprint=fingerprint)
    asked.check(inputs)
    return Question(request=request, inputs=inputs, profile=profile)


def _check(name: str, value: int | None, largest: int) -> None:
    if value is not None and not 1 <= value <= largest:
        raise InputError(f"{name} must be from 1 to {largest}, got {value}")
