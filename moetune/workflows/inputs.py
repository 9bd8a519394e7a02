"""The constraints that plans carry, back to what they pin: the inverse of what a plan records."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from moetune.domain.document import decode, shown
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape
from moetune.domain.model import Transformer, find_model
from moetune.domain.profile import Profile
from moetune.domain.request import EXPERT_PARALLEL, SEQUENCE_PARALLEL, PlanInputs
from moetune.domain.units import dtype_bytes
from moetune.solve.layer.choose import Bounds
from moetune.solve.layer.memory import MEMORY_TAKEN
from moetune.solve.layout.space import LayoutPins
from moetune.workflows.plan import ALLOW_MODELLED, PlanRequest, plan_inputs
from moetune.workflows.profiles import is_path
from moetune.workflows.request import MOE_EVERY, NO_OFFLOAD, SIZES

_NUMBERS = MappingProxyType(
    {
        "forward-degree": 256, "backward-degree": 256, "max-degree": 256,
        "min-chunk-tokens": 2**31,
        "num-layers": 1024, "num-heads": 4096, "seq": 2**24, "vocab": 2**24, "moe-every": 1024,
        "dp": 2**20, "ep": 2**20, "tp": 2**20, "pp": 2**20, "micro-batch": 2**20,
        MEMORY_TAKEN: 2**50,
    }
)  # fmt: skip
"""Flags with a number, and the largest one: what is larger takes long to refuse."""
_SWITCHES = ("zero", "offload", NO_OFFLOAD, SEQUENCE_PARALLEL, ALLOW_MODELLED)
_BOUNDS = (
    "forward-degree", "backward-degree", "max-degree", "min-chunk-tokens", "order", "strategy",
)  # fmt: skip
_PINS = ("dp", "ep", "tp", "pp", "micro-batch", "zero", "offload", EXPERT_PARALLEL)
_FLAGS = tuple(dict.fromkeys((*_BOUNDS, *SIZES, *_PINS, *_NUMBERS, *_SWITCHES)))

_Value = int | bool | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """What constraints pin.

    Args:
        sizes: of a whole model, by the name of the field.
    """

    bounds: Bounds
    pins: LayoutPins
    sizes: Mapping[str, int]
    sequence_parallel: bool
    memory_taken_bytes: int
    allow_modelled: bool

    def transformer(self, *, model: str | None, layer: LayerShape | None) -> Transformer | None:
        """Return the whole model that they make of a named model or a layer; None for a layer.

        Raises:
            InputError: sizes are missing, or one layer is asked for by name.
        """
        if not self.sizes:
            return None
        if model is not None:
            own = find_model(model).transformer
            if own is None:
                flag = next(flag for flag, name in SIZES.items() if name in self.sizes)
                raise InputError(f"{flag} is for a whole model, and {model} is one layer")
            return replace(own, moe=own.moe, **self.sizes)
        missing = [flag for flag, name in SIZES.items() if name not in {"moe_every", *self.sizes}]
        if layer is None or missing:
            raise InputError(
                f"a whole model lacks {', '.join(missing) or 'its layer'}",
                f"the constraints {', '.join(SIZES)} go together, with a layer",
            )
        return Transformer(moe=layer, **{"moe_every": MOE_EVERY, **self.sizes})


def read_constraints(texts: Mapping[str, str], where: str) -> Pinned:
    """Return what the constraints of a plan pin.

    Args:
        where: what they are called in an error.

    Raises:
        InputError: a name is unknown, or a value wrong; the text names it.
    """
    values = {flag: _value(flag, text, where) for flag, text in texts.items()}
    pins = _named(values, _PINS)
    if values.get(NO_OFFLOAD):
        pins["offload"] = False
    sizes = {SIZES[flag]: int(value) for flag, value in values.items() if flag in SIZES}
    return Pinned(
        bounds=decode(Bounds, _named(values, _BOUNDS), where),
        pins=decode(LayoutPins, pins, where),
        sizes=sizes,
        sequence_parallel=bool(values.get(SEQUENCE_PARALLEL)),
        memory_taken_bytes=int(values.get(MEMORY_TAKEN, 0)),
        allow_modelled=bool(values.get(ALLOW_MODELLED)),
    )


def _value(flag: str, text: str, where: str) -> _Value:
    if flag not in _FLAGS:
        near = difflib.get_close_matches(flag, _FLAGS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(_FLAGS))}"
        raise InputError(f"{where} has the unknown name {shown(flag)}", hint)
    if flag in _SWITCHES:
        if text not in {"true", "false"}:
            raise InputError(f'{where}.{flag} must be "true" or "false", got {shown(text)}')
        return text == "true"
    if flag not in _NUMBERS:
        return text
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(_NUMBERS[flag]))
    if not is_number or int(text) > _NUMBERS[flag]:
        raise InputError(
            f"{where}.{flag} must be a whole number up to {_NUMBERS[flag]}, as a text, "
            f"got {shown(text)}"
        )
    return int(text)


def _named(values: Mapping[str, _Value], flags: tuple[str, ...]) -> dict[str, _Value]:
    return {flag.replace("-", "_"): values[flag] for flag in flags if flag in values}


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
