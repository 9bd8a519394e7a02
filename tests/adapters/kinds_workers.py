"""What ranks do in the tests of adapted models under checkpoints and with frozen parts."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import moetune
from moetune.domain.plan import Decision
from tests.adapters.tiny_models import loss_of, tiny, tokens_of
from tests.adapters.workers import TOLERANCE, layers_of, local_part, mean_reference, rank_of
from tests.runtime.poison import poison


def _prepared(whole: Any, *, chunks: int = 1) -> tuple[Any, Any]:
    """Return an adapted copy of a model, and it under DistributedDataParallel.

    Where experts alone are trained there is nothing for the wrapper, which torch then refuses.
    """
    adapted = moetune.prepare_ddp(moetune.adapt(copy.deepcopy(whole)))
    for layer in layers_of(adapted):
        layer.pin(Decision(forward_degree=chunks, backward_degree=chunks, strategy="none"))
    experts = {id(each) for layer in layers_of(adapted) for each in layer.experts.parameters()}
    rest = [each for each in adapted.parameters() if id(each) not in experts]
    is_dense = any(each.requires_grad for each in rest)
    return adapted, DistributedDataParallel(adapted) if is_dense else adapted


def _check(adapted: Any, whole: Any) -> None:
    """Hold all gradients against those of the mean loss on one rank."""
    experts = {id(each) for layer in layers_of(adapted) for each in layer.experts.parameters()}
    pairs = zip(adapted.named_parameters(), whole.named_parameters(), strict=True)
    for (name, weight), (_, exact) in pairs:
        if exact.grad is None or not weight.requires_grad:
            assert weight.grad is None or not weight.grad.any(), name
            continue
        wanted = local_part(adapted, weight, exact.grad) if id(weight) in experts else exact.grad
        grad = torch.zeros_like(wanted) if weight.grad is None else weight.grad
        assert torch.isfinite(grad).all(), name
        assert (grad - wanted).abs().max() <= TOLERANCE, name


def checkpoints_change_no_gradient() -> None:
    """transformers' own checkpointing, reentrant and not, in one chunk and in four."""
    rank = rank_of()[0]
    for family in ("Qwen3Moe", "GptOss", "Llama4"):
        whole = tiny(family)
        mean_reference(whole)
        for reentrant, chunks in ((False, 1), (True, 4)):
            adapted, wrapped = _prepared(whole, chunks=chunks)
            adapted.train()
            adapted.gradient_checkpointing_enable({"use_reentrant": reentrant})
            adapted.enable_input_require_grads()
            loss_of(wrapped(input_ids=tokens_of(rank)).logits, rank).backward()
            _check(adapted, whole)
            record = moetune.routing_record(adapted)
            assert {each.num_steps for each in record.layers} == {1}, (family, reentrant)


def frozen_parts_stay_without_gradients() -> None:
    """A frozen router, half of the matrices, all experts, and everything but the experts."""
    rank = rank_of()[0]
    kinds: tuple[Callable[[str], bool], ...] = (
        lambda name: "gate.weight" in name, lambda name: "down_proj" in name,
        lambda name: "experts" in name, lambda name: "experts" not in name,
        lambda name: "layers.0" in name,
    )  # fmt: skip
    for is_frozen in kinds:
        whole = tiny("Qwen3Moe")
        for name, each in whole.named_parameters():
            each.requires_grad_(requires_grad=not is_frozen(name))
        mean_reference(whole)
        adapted, wrapped = _prepared(whole, chunks=3)
        loss_of(wrapped(input_ids=tokens_of(rank)).logits, rank).backward()
        _check(adapted, whole)
        assert moetune.clip_grad_norm_(adapted, 1.0) > 0


def single_token_and_no_token() -> None:
    """A rank with one token, repeated; the last one's tokens choose few experts."""
    rank, num_ranks = rank_of()
    whole = tiny("Mixtral")
    batches = [torch.full((1, 1 + 6 * (each % 2)), 3) for each in range(num_ranks)]
    for batch in batches:
        (whole(input_ids=batch).logits.sum() / num_ranks).backward()
    for strategy in ("none", "S4"):
        adapted, wrapped = _prepared(whole)
        for layer in layers_of(adapted):
            poison(layer)
            layer.pin(Decision(forward_degree=3, backward_degree=3, strategy=strategy))
        wrapped(input_ids=batches[rank]).logits.sum().backward()
        _check(adapted, whole)


def any_ranks() -> None:
    """What is shown on any number of ranks, which are started once."""
    checkpoints_change_no_gradient()
    frozen_parts_stay_without_gradients()
    single_token_and_no_token()
