"""Parameters of another module as a layer's local experts, where they are: nothing is copied.

`routed_layer` runs them for modules of model libraries, which keep their names and classes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from moetune.runtime.moe.activations import FusedForm
from moetune.runtime.moe.executor import GradientMean
from moetune.runtime.moe.expert_module import local_experts, share_checkpoints
from moetune.runtime.moe.function import MemoryPolicy
from moetune.runtime.moe.placement import ExpertPlacement
from moetune.runtime.moe.shared_work import Work, run_experts
from moetune.runtime.moe.wrappers import SpreadExperts, WrapperCheck, check_plain, guard


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names of a module's parameters of experts; "" for those that it has not.

    Args:
        up: the gate and the up-projection in one, (E, D, 2·H) in the layout of their form; with
            `factor`, what silu takes, (E, H, D), as is each of three matrices of its own.
        down: (E, H, D), likewise; with `factor`, (E, D, H).
        up_bias: (E, 2·H).
        down_bias: (E, D).
        factor: what silu's result is multiplied by, (E, H, D).
    """

    up: str = "gate_up_proj"
    down: str = "down_proj"
    up_bias: str = ""
    down_bias: str = ""
    factor: str = ""

    @property
    def all(self) -> tuple[str, ...]:
        """The names that there are."""
        return tuple(filter(None, (self.up, self.down, self.up_bias, self.down_bias, self.factor)))


class BorrowedExperts:
    """The local experts among a module's parameters.

    Args:
        module: its parameters have this rank's experts, before `keep_own` all ranks' ones, or are
            DTensors of them.
        form: None of experts with three matrices of their own, which are swiglu.
        are_wrapped: another library's data-parallel wrapper knows that they are no replicas.

    Attributes:
        gradients, compute_dtype: as in `Experts`.
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
        self._module, self._names, self._form = module, names, form
        self.placement = placement
        self.gradients = GradientMean()
        self.compute_dtype: torch.dtype | None = None
        self._wrapper_check: WrapperCheck | None = None
        if placement.num_ranks > 1 and not are_wrapped:
            self._wrapper_check = WrapperCheck(placement)

    def keep_own(self) -> None:
        """Cut the module's parameters to this rank's experts, one after another.

        Parameters stay the objects that they are. Their entries in state dicts become DTensors of
        all ranks' experts: see `placement`.
        """
        if self.placement.num_ranks == 1:
            return
        for name in self._names.all:
            parameter = self._module.get_parameter(name)
            parameter.grad = None
            own = self.placement.own(parameter.detach())
            parameter.data = own.clone(memory_format=torch.contiguous_format)
            del own  # before the next one is cut
        guard(self._module, self.placement)
        share_checkpoints(self._module, self.placement)

    def mark_own(self) -> None:
        """Tell data-parallel wrappers that only this rank has the parameters."""
        if isinstance(self._module, SpreadExperts):
            self._module.tag()

    @property
    def form(self) -> FusedForm | None:
        """Form of fused experts; None of others."""
        return self._form

    @property
    def module(self) -> nn.Module:
        """The module that has the parameters."""
        return self._module

    @property
    def w1(self) -> torch.Tensor:
        """The gates and up-projections, or the gates alone, as the module has them."""
        up: torch.Tensor = getattr(self._module, self._names.up)
        return up

    @property
    def b1(self) -> torch.Tensor | None:
        """Their biases."""
        return self._parameter(self._names.up_bias)

    @property
    def local_experts(self) -> int:
        """Experts of this rank."""
        return self.placement.num_local

    def check_wrappers(self) -> None:
        """Check that no data-parallel wrapper mixes the experts of different ranks.

        Raises:
            InputError: one does, or what ranks have alone is computed from other parameters.
        """
        if self._wrapper_check is not None:
            check_plain(self._module, self._names.all)
            self._wrapper_check.run(self._module, self.w1)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return all parameters."""
        return (getattr(self._module, name) for name in self._names.all)

    def __call__(
        self,
        x_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        policy: MemoryPolicy,
        work: Work | None = None,
    ) -> torch.Tensor:
        """Return Σₖ weightₖ · expertₖ(x) of this step's routing (T, D)."""
        names = self._names
        w1, b1, w2, b2, w3 = (
            local_experts(self.placement, name, self._parameter(name))
            for name in (names.up, names.up_bias, names.down, names.down_bias, names.factor)
        )
        if self._form is None:
            w1, w2, w3 = (None if each is None else each.mT for each in (w1, w2, w3))
        return run_experts(x_TD, weights_TK, policy, (w1, b1, w2, b2, w3), work)

    def _parameter(self, name: str) -> torch.Tensor | None:
        value: torch.Tensor | None = getattr(self._module, name) if name else None
        return value
