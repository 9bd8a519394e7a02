"""What a request for one layer may not say about how its ranks share experts and tokens."""

from moetune.domain.errors import InputError
from moetune.solve.choice import Bounds
from moetune.solve.layout_space import LayoutPins


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
