"""What a request for one layer may not say about how its ranks share experts and tokens."""

from dataclasses import fields
from types import MappingProxyType

from moetune.domain.errors import InputError
from moetune.domain.model import Transformer
from moetune.solve.layer.choose import Bounds
from moetune.solve.layout.space import LayoutPins


def check_tensor(bounds: Bounds) -> None:
    """Raise InputError where the bounds are of dispatches: a tensor-parallel group has none."""
    if bounds.strategy not in {None, "none"}:
        raise InputError(
            f"strategy {bounds.strategy} excludes --expert-parallel tensor, where nothing is "
            "dispatched and no memory reused",
            "leave --strategy away, or take --expert-parallel all_to_all",
        )
    if bounds.order is not None:
        raise InputError(
            f"order {bounds.order} excludes --expert-parallel tensor, where a chunk has one "
            "transfer",
            "leave --order away, or take --expert-parallel all_to_all",
        )


def check_shards(pins: LayoutPins, *, is_whole: bool) -> None:
    """Raise InputError where sequence shards are asked for that no plan has.

    Args:
        is_whole: whether a whole model is asked for.
    """
    if is_whole:
        raise InputError(
            "--sequence-parallel is for one layer, and this is a whole model",
            "leave it away, or plan its layer: --d-model, --d-hidden and --num-experts",
        )
    if pins.expert_parallel != "tensor":
        raise InputError(
            "--sequence-parallel needs --expert-parallel tensor: where tokens travel to the "
            "experts, every rank has its own anyway",
            "add --expert-parallel tensor, or leave --sequence-parallel away",
        )


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
