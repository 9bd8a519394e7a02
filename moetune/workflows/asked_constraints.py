"""The constraints that plans carry, back to what they pin: the inverse of what a plan records."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from moetune.domain.document import decode, shown
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape
from moetune.domain.models import find_model
from moetune.domain.plan_inputs import EXPERT_PARALLEL, SEQUENCE_PARALLEL
from moetune.domain.transformer import Transformer
from moetune.solve.choice import Bounds
from moetune.solve.layout_space import LayoutPins
from moetune.solve.room import MEMORY_TAKEN
from moetune.workflows.asked_layout import MOE_EVERY, NO_OFFLOAD, SIZES
from moetune.workflows.plan import ALLOW_MODELLED

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
