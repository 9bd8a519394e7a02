"""The local experts' parameters: a layer's module, or parts of another library's.

The parameters are drawn, saved, loaded and passed to the autograd function. A layer calls the
module like any other module, so that its hooks run, for example FSDP2's.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape
from moetune.runtime.moe.activations import FusedForm
from moetune.runtime.moe.optimizer_states import watch_optimizers
from moetune.runtime.moe.placement import ExpertPlacement, cut, is_dtensor, local_part
from moetune.runtime.moe.weight_grads import GradientMean
from moetune.runtime.moe.wrappers import (
    SpreadExperts,
    WrapperCheck,
    check_dtensor,
    check_plain,
    guard,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

RunStep = Callable[[torch.Tensor, torch.Tensor, Sequence[Any]], torch.Tensor]
"""Runs a step on x (T, D), weights (T, K) and `ExpertFunction`'s parameters; returns (T, D)."""
_GOLDEN = 0x9E3779B97F4A7C15
_SEED_BITS = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """The names of a module's parameters of experts; "" for a parameter that it lacks.

    Args:
        up: the fused gate and up-projection, (E, D, 2·H) in the layout of their form; with
            `factor`, the gate alone, whose product silu takes, (E, H, D).
        down: the down-projection, (E, H, D) in the layout of the form; with `factor`, (E, D, H).
        up_bias: bias of `up`, (E, 2·H).
        down_bias: bias of `down`, (E, D).
        factor: the up-projection, whose product multiplies silu's result, (E, H, D).
    """

    up: str = "gate_up_proj"
    down: str = "down_proj"
    up_bias: str = ""
    down_bias: str = ""
    factor: str = ""

    @property
    def all(self) -> tuple[str, ...]:
        """The names of the parameters that the module has."""
        return tuple(filter(None, (self.up, self.down, self.up_bias, self.down_bias, self.factor)))


class LocalExperts(ABC):
    """This rank's experts among a module's parameters, in the form that a layer's steps need.

    Attributes:
        names: names of the parameters.
        form: form of fused experts; None for separate matrices.
        gradients: turns this step's gradients into means, for data-parallel wrappers.
        compute_dtype: dtype of the step; None takes the dtype of its tokens.
    """

    placement: ExpertPlacement
    names: ExpertNames
    form: FusedForm | None = None
    gradients: GradientMean
    compute_dtype: torch.dtype | None = None
    _is_turned = False
    _wrapper_check: WrapperCheck | None = None

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The module that has the parameters."""

    @property
    def up(self) -> torch.Tensor:
        """The module's parameter with the gates and up-projections, or with the gates alone."""
        up: torch.Tensor = getattr(self.module, self.names.up)
        return up

    @property
    def local_experts(self) -> int:
        """The number of this rank's experts."""
        return self.placement.num_local

    @abstractmethod
    def __call__(self, *args: Any) -> torch.Tensor:  # noqa: ANN401 - as a module
        """Return the result of `run`, and run the module's hooks."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return all parameters."""
        return (getattr(self.module, name) for name in self.names.all)

    def check_wrappers(self) -> None:
        """Raise InputError if something mixes the experts of different ranks.

        That may be a data-parallel wrapper, a parametrization that computes a rank's experts, or a
        load that wrote into a state dict's copies of experts.
        """
        if self._wrapper_check is not None:
            check_plain(self.module, self.names.all)
            self._wrapper_check.run(self.module, self.up)
            self.placement.copies.check()

    def run(self, x_TD: torch.Tensor, weights_TK: torch.Tensor, step: RunStep) -> torch.Tensor:
        """Return Σₖ weightₖ · expertₖ(x) for this step's routing (T, D).

        Args:
            step: runs the step with this rank's parameters.
        """
        names, module = self.names, self.module
        parameters: list[torch.Tensor | None] = []
        for name in (names.up, names.up_bias, names.down, names.down_bias, names.factor):
            parameter: Any = getattr(module, name) if name else None
            if is_dtensor(parameter):
                parameter = local_experts(self.placement, name, parameter)
            is_turned = self._is_turned and parameter is not None
            parameters.append(parameter.mT if is_turned else parameter)
        return step(x_TD, weights_TK, parameters)


class Experts(SpreadExperts, LocalExperts):
    """The parameters of the local experts; rank r of P has the places r·E/P … (r+1)·E/P − 1.

    A place has the expert of its number, or the expert that a plan has put there. A state dict's
    entries have all ranks' experts, in their natural order: see `placement`.
    """

    w1: nn.Parameter
    w2: nn.Parameter
    b1: nn.Parameter | None
    b2: nn.Parameter | None
    w3: nn.Parameter | None

    def __init__(
        self,
        layer: LayerShape,
        placement: ExpertPlacement,
        *,
        bias: bool,
        is_replicated: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.placement = placement
        self.gradients = GradientMean()
        gated = layer.activation == "swiglu"
        has_bias = bias and not gated
        self.names = ExpertNames(
            up="w1", down="w2", up_bias="b1" if has_bias else "",
            down_bias="b2" if has_bias else "", factor="w3" if gated else "",
        )  # fmt: skip
        wide, narrow = (layer.d_model, layer.d_hidden), (layer.d_hidden, layer.d_model)
        shapes = {"w1": wide, "b1": wide[1:], "w2": narrow, "b2": narrow[1:], "w3": wide}
        for name, shape in shapes.items():
            value = None
            if name in self.names.all:
                empty = torch.empty((placement.num_local, *shape), device=device, dtype=dtype)
                value = nn.Parameter(empty)
            self.register_parameter(name, value)
        self.is_replicated = is_replicated
        self.tag()
        if placement.num_ranks > 1:
            self._wrapper_check = WrapperCheck(placement)
            share_checkpoints(self, placement)

    @property
    def module(self) -> nn.Module:
        """The module itself."""
        return self

    def reset(self, seed: int) -> None:
        """Draw each expert from a separate generator: its values do not depend on the ranks.

        Weights and biases are uniform within ±1/√fan_in, as in `nn.Linear`.
        """
        first = self.placement.first
        for place, expert in enumerate(self.placement.experts, first):
            # An empty place has values, too, which nothing reads.
            generator = torch.Generator()
            mixed = seed ^ ((expert + 1) * _GOLDEN)
            generator.manual_seed(mixed & (2**_SEED_BITS - 1))
            for name, parameter in self.named_parameters():
                fan_in = self.get_parameter("w2" if name.endswith("2") else "w1").shape[1]
                bound = 1 / math.sqrt(fan_in)
                shape = 1, *parameter.shape[1:]
                values = torch.empty(shape, dtype=torch.float64, device="cpu")
                values.uniform_(-bound, bound, generator=generator)
                local, offsets = local_part(parameter)
                row = place - (offsets[0] if is_dtensor(parameter) else first)
                if 0 <= row < len(local):
                    local[row].copy_(cut(values[0], offsets[1:], local.shape[1:]))

    forward = LocalExperts.run


class BorrowedExperts(LocalExperts):
    """The local experts in another library's module, whose parameters are used without a copy.

    Args:
        module: its parameters have this rank's experts, or DTensors of all; before `keep_local`
            they have the experts of all ranks.
        form: None for experts with three separate matrices, which are swiglu.
        are_wrapped: another library's data-parallel wrapper knows that the experts are no replicas.
    """

    def __init__(
        self,
        module: nn.Module,
        names: ExpertNames,
        form: FusedForm | None,
        placement: ExpertPlacement,
        *,
        are_wrapped: bool = False,
    ) -> None:
        self._module, self.names, self.form = module, names, form
        self.placement = placement
        self.gradients = GradientMean()
        self._is_turned = form is None
        if placement.num_ranks > 1 and not are_wrapped:
            self._wrapper_check = WrapperCheck(placement)

    def keep_local(self) -> None:
        """Cut the module's parameters to this rank's experts, parameter by parameter.

        Parameters stay the same objects. Their entries in state dicts become DTensors of all ranks'
        experts: see `placement`.
        """
        if self.placement.num_ranks == 1:
            return
        for name in self.names.all:
            parameter = self._module.get_parameter(name)
            parameter.grad = None
            local = self.placement.local_part(parameter.detach())
            parameter.data = local.clone(memory_format=torch.contiguous_format)
            del local  # before the next is cut
        guard(self._module, self.placement)
        share_checkpoints(self._module, self.placement)

    def mark_local(self) -> None:
        """Tell data-parallel wrappers that only this rank has the parameters."""
        if isinstance(self._module, SpreadExperts):
            self._module.tag()

    @property
    def module(self) -> nn.Module:
        """The module that has the parameters."""
        return self._module

    __call__ = LocalExperts.run


def local_experts(placement: ExpertPlacement, name: str, parameter: "DTensor") -> torch.Tensor:
    """Return this rank's experts from a DTensor that FSDP2 has gathered before.

    Raises:
        InputError: the DTensor has other experts here, or only parts of them.
    """
    check_dtensor(placement, f"experts.{name}", parameter)
    local: torch.Tensor = parameter.to_local()
    whole = placement.num_local, *parameter.shape[1:]
    if local.shape != whole:
        raise InputError(
            f"experts.{name} is placed {parameter.placements}: {tuple(local.shape)} of "
            f"{tuple(parameter.shape)} are here, not {placement.num_local} whole experts",
            "leave it to moetune.prepare_fsdp, which gathers it for each call",
        )
    return local


def share_checkpoints(experts: nn.Module, placement: ExpertPlacement) -> None:
    """Make a module's entries in state dicts DTensors of all ranks' experts: see `placement`."""
    experts.register_state_dict_post_hook(partial(_distribute, placement))
    experts.register_load_state_dict_pre_hook(partial(_take_part, placement))
    watch_optimizers(experts, placement)


def _distribute(
    placement: ExpertPlacement, experts: nn.Module, state: dict[str, Any], prefix: str, _: object
) -> None:
    """Replace tensors in a state dict with DTensors; variables (`keep_vars`) stay."""
    for name, parameter in experts.named_parameters(recurse=False):
        value = state.get(prefix + name)
        if value is parameter or not isinstance(value, torch.Tensor):
            continue
        if not is_dtensor(value):
            state[prefix + name] = placement.distribute(value)


def _take_part(
    placement: ExpertPlacement,
    experts: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    *_: object,
) -> None:
    """Replace all ranks' experts with this rank's, in a state dict that is being loaded."""
    for name, parameter in experts.named_parameters(recurse=False):
        value = state.get(prefix + name)
        if isinstance(value, torch.Tensor) and not is_dtensor(parameter):
            part = placement.part_of(value, prefix + name)
            # An assigned slice would keep the memory of all experts.
            is_assigned = metadata.get("assign_to_params_buffers", False)
            state[prefix + name] = part.clone() if is_assigned else part
