"""What ranks do in the tests of adapted models."""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import moetune
from moetune.domain.constraints import Strategy
from moetune.domain.plan import Decision
from moetune.runtime.moe.routed_layer import RoutedLayer
from tests.adapters.tiny_models import loss_of, tiny, tokens_of

TOLERANCE = 1e-10
STRATEGIES: tuple[Strategy, ...] = ("none", "S1", "S2", "S3", "S4")


def rank_of() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def layers_of(model: torch.nn.Module) -> list[RoutedLayer]:
    return [module for module in model.modules() if isinstance(module, RoutedLayer)]


def reference(model: Any) -> torch.Tensor:
    """Run a model on all ranks' tokens, and return this rank's logits."""
    (mine, num_ranks), found = rank_of(), torch.empty(0)
    for rank in range(num_ranks):
        logits = model(input_ids=tokens_of(rank)).logits
        loss_of(logits, rank).backward()
        if rank == mine:
            found = logits.detach()
    return found


def check_step(adapted: Any, whole: Any, wanted: torch.Tensor) -> None:
    """Hold a step's logits and all gradients against those of the model on one rank."""
    rank, num_ranks = rank_of()
    adapted.zero_grad(set_to_none=True)
    logits = adapted(input_ids=tokens_of(rank)).logits
    assert (logits - wanted).abs().max() <= TOLERANCE
    loss_of(logits, rank).backward()
    experts = {id(each) for layer in layers_of(adapted) for each in layer.experts.parameters()}
    pairs = zip(adapted.named_parameters(), whole.named_parameters(), strict=True)
    for (name, found), (same_name, one) in pairs:
        assert name == same_name
        assert one.grad is not None, name
        grad = one.grad
        if id(found) in experts:
            share = len(grad) // num_ranks
            grad = grad[rank * share : (rank + 1) * share]
        elif num_ranks > 1:
            found.grad = torch.zeros_like(one) if found.grad is None else found.grad
            dist.all_reduce(found.grad)
        assert found.grad is not None, name
        assert found.grad.shape == grad.shape, name
        assert (found.grad - grad).abs().max() <= TOLERANCE, name
        assert grad.abs().max() > TOLERANCE, name


def equal_models(
    families: Sequence[str], degrees: Sequence[int], strategies: Sequence[Strategy] = STRATEGIES
) -> None:
    """Every pair of degrees and every strategy, for models of these families."""
    for family in families:
        whole = tiny(family)
        adapted = moetune.adapt(copy.deepcopy(whole))
        wanted = reference(whole)
        layers = layers_of(adapted)
        assert layers
        check_step(adapted, whole, wanted)
        for forward, backward in itertools.product(degrees, degrees):
            for strategy in strategies:
                for layer in layers:
                    layer.poison_buffers()
                    layer.pin(
                        Decision(
                            forward_degree=forward, backward_degree=backward, strategy=strategy
                        )
                    )
                check_step(adapted, whole, wanted)
