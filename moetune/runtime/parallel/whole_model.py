"""Values and expert layers of a model that was built whole, on the ranks of a layout.

A model on the meta device gets memory only for its stages. Then every module draws its values from
a seed and the module's name.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from moetune.comm.group import Communicator
from moetune.domain.errors import InputError
from moetune.runtime.moe.layer import ExpertLayer, MoELayer, RoutedLayer
from moetune.runtime.moe.planned_layer import PlannedLayer
from moetune.runtime.parallel.groups import ParallelGroups
from moetune.runtime.replicas import equalize, named_layers, owners_of


def check_layers(model: nn.Module, blocks: nn.ModuleList) -> None:
    """Raise InputError unless a layout can spread all expert layers, and blocks contain them."""
    inside = {id(module) for module in blocks.modules()}
    for name, layer in named_layers(model):
        if type(layer) is not MoELayer and not isinstance(layer, RoutedLayer):
            raise InputError(
                f"{name} is a {type(layer).__name__}, which moetune.parallelize does not spread",
                "use moetune.MoELayer itself",
            )
        if id(layer) not in inside:
            raise InputError(
                f"{name} is a layer of experts outside of the model's blocks",
                'put it into a block, or name the list of blocks, as in blocks="layers"',
            )


def equal_values(model: nn.Module, ranks: ParallelGroups, world: Communicator) -> None:
    """Give all ranks the first rank's values of everything except spread experts; a collective."""
    spread = owners_of(named_layers(model))
    values = [value for value in (*model.parameters(), *model.buffers()) if id(value) not in spread]
    equalize(values, world, device=ranks.mesh.device_type)


def spread_experts(
    model: nn.Module,
    ranks: ParallelGroups,
    blocks: Iterable[nn.Module],
    placements: Sequence[Sequence[int]] = (),
) -> None:
    """Replace the expert layers with layers over the ranks of the layout; a collective.

    Gates keep their parameters, and experts keep their values.

    Args:
        blocks: this rank's blocks; layers of other blocks are not replaced.
        placements: for each layer, the expert of each place; empty for the natural order.

    Raises:
        InputError: a layer cannot be spread like this, or is spread already.
    """
    mine = {id(module) for block in blocks for module in block.modules()}
    layers = named_layers(model)
    _check_placements(layers, placements)
    for (name, layer), experts in zip(layers, placements or [()] * len(layers), strict=True):
        if not isinstance(layer, MoELayer):
            _check_adapted(layer, ranks, experts, name)
            ranks.pin(layer)
            continue
        layer.experts.placement.check_natural("moetune.parallelize")
        spread = _spread(layer, ranks, experts) if id(layer) in mine else None
        _give_experts(layer, spread, name)
        if spread is not None:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, spread)


def _check_adapted(
    layer: PlannedLayer, ranks: ParallelGroups, experts: Sequence[int], name: str
) -> None:
    """Raise InputError unless a layer of `adapt` has its experts on the plan's ranks."""
    if experts:
        raise InputError(
            f"{name}: the plan places experts on other ranks, and those of a transformers model "
            "stay in their natural order",
            "plan with --expert-placement natural",
        )
    if layer.communicator.members != ranks.expert_communicator.members:
        raise InputError(
            f"{name} is spread over other ranks than the plan's",
            "leave moetune.adapt to moetune.parallelize",
        )


@torch.no_grad()
def _give_experts(layer: MoELayer, spread: ExpertLayer | None, name: str) -> None:
    """Give a spread layer its experts, place by place; ranks without that layer take part."""
    wanted = () if spread is None else spread.experts.placement.experts
    into = [*spread.experts.parameters()] if spread is not None else []
    for number, parameter in enumerate(layer.experts.parameters()):
        local = parameter.detach().contiguous()
        for place, values in enumerate(() if local.is_meta else local):
            gathered = layer.communicator.all_gather_values(values, f"the experts of {name}")
            for rank, expert in enumerate(range(place, layer.shape.num_experts, len(local))):
                if expert in wanted:
                    into[number][wanted.index(expert)] = gathered[rank]


def _check_placements(
    layers: Sequence[tuple[str, PlannedLayer]], placements: Sequence[Sequence[int]]
) -> None:
    """Raise InputError if a plan places the experts of other layers."""
    planned = [len(experts) for experts in placements]
    actual = [layer.shape.num_experts for _, layer in layers]
    is_same = len(planned) == len(actual) and all(
        number in {0, wanted} for number, wanted in zip(planned, actual, strict=True)
    )
    if placements and not is_same:
        raise InputError(
            f"the plan places the experts of {len(planned)} layers, {_numbers(planned)} each, and "
            f"the model has {len(actual)} layers of {_numbers(actual)} experts",
            "record the routing of this model with moetune.routing_record, and plan with it",
        )


def _numbers(sizes: Sequence[int]) -> str:
    return " or ".join(map(str, dict.fromkeys(size for size in sizes if size))) or "no"


def _spread(layer: MoELayer, ranks: ParallelGroups, experts: Sequence[int]) -> ExpertLayer:
    weight = layer.experts.w1
    spread = ranks.expert_layer(
        layer.shape, placement=experts or None,
        bias=layer.experts.b1 is not None, dtype=weight.dtype, device="meta",
        capacity_factor=layer.gate.capacity_factor, normalize_topk=layer.gate.normalize_topk,
    )  # fmt: skip
    spread.train(layer.training)
    for old, new in zip(layer.experts.parameters(), spread.experts.parameters(), strict=True):
        new.requires_grad_(old.requires_grad)
    if not weight.is_meta:
        give_memory(spread.experts, weight.device)
    spread.gate.weight = layer.gate.weight
    return spread


def give_memory(module: nn.Module, device: torch.device | str) -> None:
    """Allocate uninitialised memory for parameters and buffers on the meta device."""
    made: dict[int, torch.Tensor] = {}
    for child in module.modules():
        tensors: tuple[dict[str, Any], ...] = child._parameters, child._buffers  # noqa: SLF001 - names skip tied tensors
        for values in tensors:
            for name, value in values.items():
                if value is None or not value.is_meta:
                    continue
                if id(value) not in made:
                    made[id(value)] = _with_memory(value, device)
                values[name] = made[id(value)]


def _with_memory(value: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    real = torch.empty_like(value, device=device)
    if isinstance(value, nn.Parameter):
        real = nn.Parameter(real, value.requires_grad)
        real.__dict__.update(value.__dict__)  # tags that data-parallel wrappers read
    return real


def check_can_draw(model: nn.Module) -> None:
    """Raise InputError unless every tensor on the meta device has a module that draws it."""
    drawn: set[int] = set()
    for _, module in model.named_modules():
        if hasattr(module, "reset_parameters"):
            values = module.modules() if isinstance(module, PlannedLayer) else (module,)
            drawn |= {
                id(value) for child in values
                for value in (*child.parameters(recurse=False), *child.buffers(recurse=False))
            }  # fmt: skip
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_meta and id(value) not in drawn:
            raise InputError(
                f"{name} is on the meta device, and no reset_parameters() gives it values",
                "give its module that method, or build the model with its memory",
            )


def draw_values(part: nn.Module, seed: int) -> None:
    """Draw each module's values from the seed and its name, equally under every layout.

    Args:
        part: a stage of a model that was built on the meta device; all ranks of its layers of
            experts call this together.
    """
    for name, module in part.named_modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
                reset()


def add_balance(blocks: Iterable[nn.Module], weight: float) -> None:
    """Add each layer's balance loss, times `weight`, to the gradients.

    Raises:
        InputError: a layer has no balance loss, because its router is the model's.
    """
    for block in blocks:
        for name, layer in named_layers(block):
            if not isinstance(layer, ExpertLayer):
                raise InputError(
                    f"{name} has no balance loss: its router is the model's",
                    "give balance=0, and add the router's loss to yours",
                )
            layer.register_forward_hook(lambda moe, _, y: with_loss(y, moe.aux_loss, weight))


def with_loss(x: torch.Tensor, loss: torch.Tensor, weight: float) -> torch.Tensor:
    """Return x, and backward add the gradient of weight · loss, which later stages do not get."""
    y: torch.Tensor = _WithLoss.apply(x, loss, weight)  # type: ignore[no-untyped-call]
    return y


class _WithLoss(torch.autograd.Function):
    """The identity on x; backward it adds the gradient of a loss that later stages do not get."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor, weight: float) -> torch.Tensor:  # noqa: ANN401
        ctx.grad = loss.new_tensor(weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # noqa: ANN401
        return grad, ctx.grad, None
