"""The local experts' parameters as a module: drawn, saved, loaded, and handed to the function.

Layers call it like any module, so that hooks on it fire: FSDP2's, for example.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape
from moetune.runtime.moe.activations import FusedForm
from moetune.runtime.moe.executor import GradientMean
from moetune.runtime.moe.function import MemoryPolicy
from moetune.runtime.moe.local_parts import cut, is_dtensor, local_part
from moetune.runtime.moe.optimizer_states import watch_optimizers
from moetune.runtime.moe.placement import ExpertPlacement
from moetune.runtime.moe.shared_work import Work, run_experts
from moetune.runtime.moe.wrappers import SpreadExperts, WrapperCheck, check_dtensor, check_plain

_NAMES = ("w1", "b1", "w2", "b2", "w3")
_GOLDEN = 0x9E3779B97F4A7C15
_SEED_BITS = 63


class LocalExperts(Protocol):
    """The experts of this rank, as a layer's steps need them.

    Attributes:
        gradients: makes means of this step's gradients, for data-parallel wrappers.
        compute_dtype: of the step, whatever that of its tokens; None takes theirs.
    """

    placement: ExpertPlacement
    gradients: GradientMean
    compute_dtype: torch.dtype | None

    @property
    def form(self) -> FusedForm | None:
        """Form of fused experts; None of others."""

    @property
    def module(self) -> nn.Module:
        """The module that has the parameters."""

    @property
    def w1(self) -> torch.Tensor:
        """Matrices of the up-projection."""

    @property
    def b1(self) -> torch.Tensor | None:
        """Biases of the up-projection."""

    @property
    def local_experts(self) -> int:
        """Experts of this rank."""

    def check_wrappers(self) -> None:
        """Check that no data-parallel wrapper mixes the experts of different ranks."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return all parameters."""

    def __call__(
        self,
        x_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        policy: MemoryPolicy,
        work: Work | None = None,
    ) -> torch.Tensor:
        """Return Σₖ weightₖ · expertₖ(x) (T, D)."""


class Experts(SpreadExperts):
    """Parameters of the local experts, rank r of P holding places r·E/P … (r+1)·E/P − 1.

    A place has the expert of its number, or the one that a plan has put there. The parameters'
    entries in state dicts are those of all ranks, in the experts' own order: see `placement`.

    Attributes:
        gradients: makes means of this step's gradients, for data-parallel wrappers.
        compute_dtype: of the step, whatever that of its tokens; None takes theirs.
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
        self.compute_dtype: torch.dtype | None = None
        wide, narrow = (layer.d_model, layer.d_hidden), (layer.d_hidden, layer.d_model)
        gated = layer.activation == "swiglu"
        shapes: dict[str, tuple[int, ...] | None] = {
            "w1": wide,
            "b1": wide[1:] if bias and not gated else None,
            "w2": narrow,
            "b2": narrow[1:] if bias and not gated else None,
            "w3": wide if gated else None,
        }
        for name, shape in shapes.items():
            value = None
            if shape is not None:
                empty = torch.empty((placement.num_local, *shape), device=device, dtype=dtype)
                value = nn.Parameter(empty)
            self.register_parameter(name, value)
        self.is_replicated = is_replicated
        self.tag()
        self._wrapper_check: WrapperCheck | None = None
        if placement.num_ranks > 1:
            self._wrapper_check = WrapperCheck(placement)
            share_checkpoints(self, placement)

    @property
    def form(self) -> FusedForm | None:
        """None: each product has a matrix of its own."""
        return None

    @property
    def module(self) -> nn.Module:
        """The module itself."""
        return self

    @property
    def local_experts(self) -> int:
        """Experts of this rank."""
        return self.placement.num_local

    def check_wrappers(self) -> None:
        """Check that no data-parallel wrapper mixes the experts of different ranks.

        Raises:
            InputError: one does, a parametrization makes experts, or a state dict's copies of
                experts were written into.
        """
        check_plain(self, _NAMES)
        if self._wrapper_check is not None:
            self._wrapper_check.run(self, self.w1)
            self.placement.copies.check()

    def reset(self, seed: int) -> None:
        """Draw every expert from its own generator: the same values for any number of ranks.

        Weights and biases are uniform within ±1/√fan_in, as those of `nn.Linear`.
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

    def forward(
        self,
        x_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        policy: MemoryPolicy,
        work: Work | None = None,
    ) -> torch.Tensor:
        """Return Σₖ weightₖ · expertₖ(x) of this step's routing (T, D).

        Args:
            policy: of the step; its context has the routing's exchanges.
            work: as of `run_experts`.
        """
        # w1, b1, w2, b2 and w3, as they were registered
        parameters = [
            local_experts(self.placement, name, each) for name, each in self._parameters.items()
        ]
        return run_experts(x_TD, weights_TK, policy, parameters, work)


def local_experts(
    placement: ExpertPlacement, name: str, parameter: torch.Tensor | None
) -> torch.Tensor | None:
    """Return this rank's experts of a parameter, which FSDP2 has gathered before.

    Raises:
        InputError: it is a DTensor of other experts, or of parts of them.
    """
    if not is_dtensor(parameter):
        return parameter
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
    """Make DTensors of all ranks' experts of a module's entries in state dicts: see `placement`."""
    experts.register_state_dict_post_hook(partial(_distribute, placement))
    experts.register_load_state_dict_pre_hook(partial(_take_own_part, placement))
    watch_optimizers(experts, placement)


def _distribute(
    placement: ExpertPlacement, experts: nn.Module, state: dict[str, Any], prefix: str, _: object
) -> None:
    """Replace tensors in a state dict by DTensors; variables (`keep_vars`) stay."""
    for name, parameter in experts.named_parameters(recurse=False):
        value = state.get(prefix + name)
        if value is parameter or not isinstance(value, torch.Tensor):
            continue
        if not is_dtensor(value):
            state[prefix + name] = placement.distribute(value)


def _take_own_part(
    placement: ExpertPlacement,
    experts: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    *_: object,
) -> None:
    """Replace all ranks' experts in a state dict that is being loaded by this rank's."""
    for name, parameter in experts.named_parameters(recurse=False):
        value = state.get(prefix + name)
        if isinstance(value, torch.Tensor) and not is_dtensor(parameter):
            part = placement.own_part(value, prefix + name)
            # An assigned slice would keep the memory of all experts.
            is_assigned = metadata.get("assign_to_params_buffers", False)
            state[prefix + name] = part.clone() if is_assigned else part
