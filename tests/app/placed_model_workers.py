"""What ranks do with plans that place the experts of a model's layers: one process is right."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import moetune
from moetune.domain.document import decode
from moetune.domain.errors import InputError
from moetune.domain.placement import ModelPlacement
from moetune.domain.routing_record import ModelRoutingRecord
from moetune.runtime.replicas import named_layers
from tests.app import parallelize_workers as par

ORDERS = ((2, 0, 3, 1), (1, 3, 2, 0))
OTHERS = ((3, 0, 1, 2), ())
Orders = Sequence[Sequence[int]]


def placed_plan(layout: dict[str, Any], orders: Orders = ORDERS) -> Any:
    layers = [
        {"experts": [*order], "natural_skew": 2.0, "placed_skew": 1.0, "least_skew": 1.0}
        for order in orders
    ]
    why = {"natural_step_seconds": 2.0, "placed_step_seconds": 1.0, "why": "a test"}
    placement = decode(ModelPlacement, {"layers": layers} | why, "placement")
    return replace(par.plan_of(dist.get_world_size(), **layout), placement=placement)


def parallel(
    layout: dict[str, Any], orders: Orders = ORDERS, model: Any = None
) -> moetune.ParallelModel:
    model = par.decoder() if model is None else model
    return moetune.parallelize(model, placed_plan(layout, orders), loss_of=par.loss_of)


def orders_of(trained: moetune.ParallelModel) -> list[tuple[int, ...]]:
    return [layer.experts.placement.order for _, layer in named_layers(trained.parts)]


def placed_models_train_as_one_process_does(layouts: Sequence[dict[str, Any]]) -> None:
    """Losses, and after five steps of AdamW all weights under the experts' own numbers."""
    losses, state = par.trained_alone()
    for layout in layouts:
        trained = parallel(layout)
        assert set(orders_of(trained)) <= set(ORDERS)
        assert len(orders_of(trained)) == len(ORDERS) // layout.get("pp", 1)
        par.hold(trained, losses, state)


def gradients_are_those_of_the_natural_order() -> None:
    """Of every expert, by its number, and of every gate."""
    layout = {"dp": 2, "ep": 2, "zero": 0}
    runs = []
    for orders in ((), ORDERS):
        trained = parallel(layout, orders) if orders else _natural(layout)
        tokens, wanted = par.batch_of(3)
        share = trained.backward(trained.local_batch(tokens), trained.local_batch(wanted))
        grads: dict[str, torch.Tensor] = {"loss": share}
        for name, layer in named_layers(trained.parts):
            grads[f"{name}.gate"] = _grad(layer.get_parameter("gate.weight"))
            for each, parameter in layer.experts.module.named_parameters():
                rows: list[Any] = [None, None]
                mine = dict(zip(layer.experts.placement.experts, _grad(parameter), strict=True))
                dist.all_gather_object(rows, mine)
                every = rows[0] | rows[1]
                grads[f"{name}.{each}"] = torch.stack([every[number] for number in sorted(every)])
        runs.append(grads)
    natural, placed = runs
    assert natural.keys() == placed.keys()
    for name, wanted in natural.items():
        assert float((placed[name] - wanted).abs().max()) < par.SAME, name
        assert name == "loss" or float(wanted.abs().max()) > 0, name


def _natural(layout: dict[str, Any]) -> moetune.ParallelModel:
    plan = par.plan_of(dist.get_world_size(), **layout)
    return moetune.parallelize(par.decoder(), plan, loss_of=par.loss_of)


def _grad(parameter: Any) -> torch.Tensor:
    grad: torch.Tensor = parameter.grad
    return grad.detach().clone()


def checkpoints_have_the_natural_order(folder: str) -> None:
    """One that was saved under a placement loads under another, under none, and the other way."""
    losses, state = par.trained_alone()
    layout = {"dp": 2, "ep": 2}
    trained = parallel(layout)
    par.train(trained, losses)
    save({"model": trained.state_dict()}, checkpoint_id=folder)
    for number, orders in enumerate((ORDERS, OTHERS, None, ORDERS)):
        again = _natural(layout) if orders is None else parallel(layout, orders)
        loaded = again.state_dict()
        load({"model": loaded}, checkpoint_id=folder)
        again.load_state_dict(loaded)
        for name, value in again.state_dict().items():
            assert float((par.whole(value) - state[name]).abs().max()) < par.SAME, (name, orders)
        again.backward(*map(again.local_batch, par.batch_of(0)))
        folder = f"{folder}-{number}"
        save({"model": again.state_dict()}, checkpoint_id=folder)


def values_do_not_depend_on_the_placement() -> None:
    """A whole model's state, and values drawn from the meta device, are at their experts."""
    layout = {"dp": 2, "ep": 2}
    whole = {name: value + 1 for name, value in par.decoder().state_dict().items()}
    trained = parallel(layout)
    trained.load_state_dict(whole)
    for name, value in trained.state_dict().items():
        assert torch.equal(par.whole(value), whole[name]), name
    drawn = []
    for orders in (ORDERS, OTHERS):
        with torch.device("meta"):
            empty = par.Decoder().double()
        empty.register_buffer("scale", par.decoder().scale)
        state = parallel(layout, orders, empty).state_dict()
        drawn.append({name: par.whole(value) for name, value in state.items()})
    assert all(torch.equal(value, drawn[1][name]) for name, value in drawn[0].items())


def written_and_not_loaded_is_an_error() -> None:
    trained = parallel({"dp": 2, "ep": 2})
    for name, value in trained.state_dict().items():
        if ".ffn.experts." in name:
            value.to_local().add_(1)  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="call load_state_dict"):
        trained.backward(*map(trained.local_batch, par.batch_of(0)))


def records_are_of_the_whole_model(layouts: Sequence[dict[str, Any]]) -> None:
    """Every layer's rows by the experts' own numbers, whatever the stages and placements."""
    tokens, wanted = par.batch_of(0)
    alone = par.decoder()
    par.loss_of(alone(tokens), wanted).backward()
    expected = moetune.routing_record(alone)
    assert [row.num_experts for row in expected.layers] == [par.EXPERTS] * 2
    assert all(sum(row.loads) == tokens.numel() * 2 for row in expected.layers)
    for layout in layouts:
        for trained in (parallel(layout), _natural(layout)):
            with pytest.raises(InputError, match="no step was recorded"):
                moetune.routing_record(trained)
            trained.backward(trained.local_batch(tokens), trained.local_batch(wanted))
            record = moetune.routing_record(trained)
            assert isinstance(record, ModelRoutingRecord)
            assert [row.loads for row in record.layers] == [row.loads for row in expected.layers]


def what_cannot_place_refuses() -> None:
    layout = {"dp": 2, "ep": 2}
    with pytest.raises(
        InputError, match=r"layers.1.ffn.*transformers model stay.*natural order"
    ) as error:
        moetune.parallelize(par.decoder_of_transformers(), placed_plan(layout), loss_of=par.loss_of)
    assert "--expert-placement natural" in str(error.value.hint)
    with pytest.raises(InputError, match="FSDP2 writes checkpoints with the experts in the order"):
        parallel(layout | {"zero": 3})
    with pytest.raises(InputError, match="of 3 layers, 4 each, and the model has 2 layers of 4"):
        parallel(layout, (*ORDERS, ORDERS[0]))
    with pytest.raises(InputError, match="of 2 layers, 4 or 8 each, and the model has 2 layers"):
        parallel(layout, (ORDERS[0], range(8)))
