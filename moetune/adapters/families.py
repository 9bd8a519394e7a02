"""The modules of transformers and torchtitan that hold experts: parameters, form and router.

The names are those of transformers 5.20 and newer, where experts are one module with fused
parameters, and a block calls them with the choices and weights of its router. Nothing of torchtitan
is imported: the parameters' names and layouts say which experts they are.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import nn

from moetune.domain.errors import InputError
from moetune.runtime.moe.activations import ClampedGate, FusedForm, GateFunction
from moetune.runtime.moe.expert_module import ExpertNames

_FUNCTIONS: MappingProxyType[str, GateFunction] = MappingProxyType({
    "SiLU": "silu", "SiLUActivation": "silu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh",
    "ReLU": "relu",
})  # fmt: skip
"""By the class of a module's activation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsFamily:
    """One class of experts.

    Args:
        names: of the experts' parameters; with a `factor` they are swiglu.
        router: name of the router in the block of the experts.
        is_transposed: parameters are (E, out, in).
        clamp: gives the clamped gate of gpt-oss, interleaved; None of others.
        weighs_inputs: the router's weights multiply the experts' inputs, not their results.
    """

    names: ExpertNames = field(default_factory=ExpertNames)
    router: str = "gate"
    is_transposed: bool = True
    clamp: Callable[[Any], ClampedGate] | None = None
    weighs_inputs: bool = False

    def form(self, experts: Any) -> FusedForm | None:  # noqa: ANN401 - a module of either library
        """Return the experts' form; None of three matrices.

        Raises:
            InputError: the runtime has not their activation.
        """
        if self.names.factor:
            return None
        if self.clamp is not None:
            clamped = self.clamp(experts)
            return FusedForm(is_interleaved=True, is_transposed=self.is_transposed, clamped=clamped)
        name = type(experts.act_fn).__name__
        if name not in _FUNCTIONS:
            raise InputError(
                f"{type(experts).__name__} activate with {name}",
                f"moetune has {', '.join(sorted(_FUNCTIONS))}",
            )
        return FusedForm(function=_FUNCTIONS[name], is_transposed=self.is_transposed)


FAMILIES: MappingProxyType[str, ExpertsFamily] = MappingProxyType({
    "DeepseekV2Experts": ExpertsFamily(),
    "DeepseekV3Experts": ExpertsFamily(),
    "Glm4MoeExperts": ExpertsFamily(),
    "GptOssExperts": ExpertsFamily(
        names=ExpertNames(up_bias="gate_up_proj_bias", down_bias="down_proj_bias"),
        router="router", is_transposed=False,
        clamp=lambda experts: ClampedGate(
            alpha=float(experts.alpha), limit=float(experts.limit)
        ),
    ),
    "Llama4TextExperts": ExpertsFamily(router="router", is_transposed=False, weighs_inputs=True),
    "MixtralExperts": ExpertsFamily(),
    "OlmoeExperts": ExpertsFamily(),
    "Qwen2MoeExperts": ExpertsFamily(),
    "Qwen3MoeExperts": ExpertsFamily(),
    "Qwen3NextExperts": ExpertsFamily(),
})  # fmt: skip
"""By the class of the experts."""
_OF_TORCHTITAN = (
    ExpertsFamily(names=ExpertNames(up="w1_EFD", down="w2_EDF", factor="w3_EFD")),
    ExpertsFamily(
        names=ExpertNames(
            up="mlp1_weight_EGD", down="mlp2_weight_EDF", up_bias="mlp1_bias_EG",
            down_bias="mlp2_bias_ED",
        ),
        clamp=lambda experts: ClampedGate(alpha=1.702, limit=float(experts.swiglu_limit)),
    ),
)  # fmt: skip
_LIBRARY = "transformers."
_STACK_DIMS = 3
"""Dimensions of parameters with a matrix for each expert."""


def family_of(experts: nn.Module) -> ExpertsFamily:
    """Return the family of a module of experts.

    Raises:
        InputError: it is of no known class.
    """
    kind = type(experts)
    if kind.__name__ in FAMILIES and kind.__module__.startswith(_LIBRARY):
        return FAMILIES[kind.__name__]
    raise InputError(
        f"experts of the class {kind.__module__}.{kind.__name__} are not supported",
        f"supported are transformers' {', '.join(sorted(FAMILIES))}",
    )


def titan_family_of(experts: nn.Module) -> ExpertsFamily:
    """Return the family of torchtitan's `GroupedExperts` or `GptOssGroupedExperts`.

    Raises:
        InputError: the parameters are of no known class.
    """
    names = {name for name, _ in experts.named_parameters(recurse=False)}
    for family in _OF_TORCHTITAN:
        if names == set(family.names.all):
            return family
    raise InputError(
        f"{type(experts).__name__} has parameters {', '.join(sorted(names))}",
        "moetune runs torchtitan's GroupedExperts and GptOssGroupedExperts",
    )


def is_experts(module: nn.Module) -> bool:
    """Return whether a module looks like one of experts, of any class."""
    is_stack = any(parameter.dim() == _STACK_DIMS for parameter in module.parameters(recurse=False))
    return is_stack and "Expert" in type(module).__name__
