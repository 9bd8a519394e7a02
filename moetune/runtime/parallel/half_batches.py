"""Models that give half a batch other numbers than the whole one, and are refused for it."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from moetune.domain.errors import InputError
from moetune.domain.training import BATCH_SPLITS, BatchSplit
from moetune.runtime.moe.gate import Gate


def check_halves(model: nn.Module, split: BatchSplit) -> None:
    """Raise InputError where a layer's numbers would be those of half a batch."""
    if split not in BATCH_SPLITS:
        raise InputError(f"split must be one of {', '.join(BATCH_SPLITS)}, got {split!r}")
    for name, module in model.named_modules():
        gate, config = getattr(module, "gate", None), getattr(module, "config", None)
        if isinstance(gate, Gate) and gate.capacity_factor is not None:
            raise InputError(
                f"{name} drops the lightest of all tokens' pairs, and half of them is not enough "
                "to know these",
                "give it no capacity_factor, or BatchOverlap whole batches",
            )
        if isinstance(module, _BatchNorm):
            raise InputError(
                f"{name} normalizes by all tokens of a batch, and would by those of half",
                "use a norm of each token, or give BatchOverlap whole batches",
            )
        if getattr(config, "output_router_logits", False):
            raise InputError(
                f"{type(module).__name__} adds a balance loss of the tokens that it is given, half "
                "of a batch",
                "set config.output_router_logits = False, or give BatchOverlap whole batches",
            )
