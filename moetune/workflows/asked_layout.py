"""What a request for a whole model pins, under the names of its flags."""

from dataclasses import fields
from types import MappingProxyType

from moetune.domain.errors import InputError
from moetune.domain.transformer import Transformer
from moetune.solve.layout_space import LayoutPins

SIZES = MappingProxyType(
    {
        "num-layers": "num_layers",
        "num-heads": "num_heads",
        "seq": "length",
        "vocab": "vocab_size",
        "moe-every": "moe_every",
    }
)
"""Flags of a whole model's sizes, and the fields they set."""
MOE_EVERY = 2
NO_OFFLOAD = "no-offload"


def layout_constraints(
    model: Transformer, *, own: Transformer | None, pins: LayoutPins
) -> dict[str, str]:
    """Return what differs from the defaults, by flag name.

    Args:
        own: the named model's sizes; None where all were given by flags.
    """
    found = {}
    for flag, name in SIZES.items():
        default = getattr(own, name) if own else {"moe_every": MOE_EVERY}.get(name)
        if getattr(model, name) != default:
            found[flag] = str(getattr(model, name))
    for item in fields(pins):
        value = getattr(pins, item.name)
        if value is not None:
            found[item.name.replace("_", "-")] = str(value).lower()
    if pins.offload is False:
        del found["offload"]
        found[NO_OFFLOAD] = "true"
    return found


def reject_pins(pins: LayoutPins) -> None:
    """Raise InputError where one layer gets a layout; how it shares experts may be pinned."""
    for item in fields(pins):
        if item.name != "expert_parallel" and getattr(pins, item.name) is not None:
            flag = NO_OFFLOAD if item.name == "offload" else item.name.replace("_", "-")
            raise InputError(
                f"--{flag} is for a whole model, and this is one layer",
                "name a whole model (ppmoe-6.7b), or give --num-layers, --num-heads, --seq and "
                "--vocab",
            )
