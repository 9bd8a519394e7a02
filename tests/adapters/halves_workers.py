"""What ranks do in the tests of halves of a batch for models of transformers."""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moetune
from moetune.domain.errors import InputError
from tests.adapters.tiny_models import FAMILIES, VOCABULARY, tiny
from tests.adapters.workers import layers_of, own_part, rank_of

EXACT, ROUNDED = 1e-10, 1e-5
ROUTED_IN_FLOAT32 = ("DeepseekV2", "DeepseekV3", "Glm4Moe")
"""Their routers multiply in float32 whatever the model's dtype: transformers' own classes differ as
much between one call and two calls with its own cache."""
WITH_STATES = ("Qwen3Next",)
"""Layers of these carry states over positions that are no keys and values."""


def inputs_of(rank: int, *, sequences: int = 2, length: int = 11) -> dict[str, torch.Tensor]:
    """Return tokens and labels, padded on the right, and for some ranks positions."""
    generator = torch.Generator().manual_seed(30 + rank)
    ids_BS = torch.randint(VOCABULARY, (sequences, length), generator=generator)
    labels_BS = torch.where(torch.rand(ids_BS.shape, generator=generator) < 0.2, -100, ids_BS)
    mask_BS = torch.ones_like(ids_BS)
    mask_BS[-1, -3:] = 0
    inputs = {"input_ids": ids_BS, "labels": labels_BS, "attention_mask": mask_BS}
    return inputs | ({"position_ids": torch.arange(length)[None]} if rank else {})


def equal_losses_and_gradients(families: Sequence[str]) -> None:
    """In halves a model has the loss and the gradients that transformers' own code has in whole."""
    rank, num_ranks = rank_of()
    for family in families:
        whole = tiny(family)
        losses = [in_double(whole, **inputs_of(one)) for one in range(num_ranks)]
        torch.stack(losses).sum().backward()
        adapted = moetune.adapt(copy.deepcopy(whole))
        adapted.zero_grad()
        loss = partial(loss_of_half, adapted)
        overlap = moetune.BatchOverlap[dict[str, Any]](adapted, loss, split="positions")
        parts = overlap(moetune.split_positions(adapted, inputs_of(rank)))
        found = float(torch.stack(parts).sum())
        tolerance = ROUNDED if family in ROUTED_IN_FLOAT32 else EXACT
        assert abs(found - float(losses[rank].detach())) <= tolerance, family
        check_gradients(adapted, whole, tolerance)


def in_double(
    model: Any,
    shift_labels: torch.Tensor | None = None,
    num_items_in_batch: torch.Tensor | None = None,
    **inputs: Any,
) -> torch.Tensor:
    """Return the loss that transformers computes in float32, in float64; the two are as close."""
    more = {"shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
    given = {name: value for name, value in more.items() if value is not None}
    output = model(**inputs, **given)
    targets_BS, logits_BSV = shift_labels, output.logits
    if targets_BS is None:
        targets_BS, logits_BSV = inputs["labels"][:, 1:], logits_BSV[:, :-1]
    count = (targets_BS != -100).sum() if num_items_in_batch is None else num_items_in_batch
    total = torch.nn.functional.cross_entropy(
        logits_BSV.flatten(0, 1), targets_BS.flatten(), reduction="sum"
    )
    loss: torch.Tensor = total / count
    assert torch.allclose(loss.detach().float(), output.loss.detach().float(), rtol=1e-5)
    return loss


def loss_of_half(model: Any, half: dict[str, Any]) -> torch.Tensor:
    return in_double(model, **half)


def check_gradients(adapted: Any, whole: Any, tolerance: float) -> None:
    """Hold all gradients, summed over ranks, against those of the model on one rank."""
    experts = {id(each) for layer in layers_of(adapted) for each in layer.experts.parameters()}
    pairs = zip(adapted.named_parameters(), whole.named_parameters(), strict=True)
    for (name, found), (_, one) in pairs:
        assert one.grad is not None, name
        grad = own_part(adapted, found, one.grad) if id(found) in experts else one.grad
        assert found.grad is not None, name
        if id(found) not in experts:
            dist.all_reduce(found.grad)
        assert (found.grad - grad).abs().max() <= tolerance * max(1, grad.abs().max()), name


def refusals() -> None:
    """What would change numbers is refused by name."""
    inputs = inputs_of(0)
    model = tiny("Mixtral")
    for family in WITH_STATES:
        with pytest.raises(InputError, match="layers of linear_attention"):
            moetune.split_positions(tiny(family), inputs)
    with pytest.raises(InputError, match="not a model of transformers"):
        moetune.split_positions(torch.nn.Linear(2, 2), inputs)
    with pytest.raises(InputError, match="token_type_ids cannot be split"):
        moetune.split_positions(model, inputs | {"token_type_ids": inputs["labels"]})
    with pytest.raises(InputError, match="two positions"):
        moetune.split_positions(model, {"input_ids": inputs["input_ids"][:, :1]})
    for name, value, words in (
        ("attention_mask", torch.ones(2, 1, 11, 11), "attention_mask has shape"),
        ("attention_mask", inputs["attention_mask"].flip(1), "hides first positions"),
        ("position_ids", torch.zeros(3, 2, 11), "position_ids has shape"),
        ("position_ids", torch.zeros(3, 11), "position_ids has shape"),
        ("labels", inputs["labels"][:, 1:], "labels has shape"),
    ):
        with pytest.raises(InputError, match=words):
            moetune.split_positions(model, inputs | {name: value})
    checkpointed = tiny("Mixtral")
    checkpointed.train()
    checkpointed.gradient_checkpointing_enable()
    with pytest.raises(InputError, match="recomputes its layers"):
        moetune.split_positions(checkpointed, inputs)
    with_losses = tiny("Mixtral", output_router_logits=True)
    with pytest.raises(InputError, match="balance loss of the tokens that it is given"):
        moetune.BatchOverlap(with_losses, lambda half: half, split="positions")


def blind_to_the_first_half() -> None:
    """A model that drops the cache is found out before its gradients are used."""
    model = moetune.adapt(tiny("Mixtral"))

    def loss(half: dict[str, Any]) -> torch.Tensor:
        result: torch.Tensor = model(**half | {"cache": None}).loss
        return result

    overlap = moetune.BatchOverlap(model, loss, split="positions")
    with pytest.raises(InputError, match="no attention of the last positions"):
        overlap(moetune.split_positions(model, inputs_of(0)))


def all_of_it() -> None:
    """All of the above in one start of the ranks."""
    equal_losses_and_gradients([one for one in FAMILIES if one not in WITH_STATES])
    refusals()
    blind_to_the_first_half()
