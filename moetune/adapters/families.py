"""The modules of transformers that hold experts: their parameters, form and router.

The names are those of transformers 5.20 and newer, where experts are one module with fused
parameters, and a block calls them with the choices and weights of its router.
"""

from dataclasses import dataclass
from types import MappingProxyType

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
        router: name of the router in the block of the experts.
        is_transposed: parameters are (E, out, in).
        is_clamped: the gate is gpt-oss's, interleaved.
        weighs_inputs: the router's weights multiply the experts' inputs, not their results.
    """

    router: str = "gate"
    is_transposed: bool = True
    is_clamped: bool = False
    weighs_inputs: bool = False

    @property
    def names(self) -> ExpertNames:
        """Names of the experts' parameters."""
        if not self.is_clamped:
            return ExpertNames()
        return ExpertNames(up_bias="gate_up_proj_bias", down_bias="down_proj_bias")

    def form(self, experts: nn.Module) -> FusedForm:
        """Return the experts' form.

        Raises:
            InputError: the runtime has not their activation.
        """
        if self.is_clamped:
            clamped = ClampedGate(alpha=float(experts.alpha), limit=float(experts.limit))  # type: ignore[arg-type]
            return FusedForm(is_interleaved=True, clamped=clamped)
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
    "GptOssExperts": ExpertsFamily(router="router", is_transposed=False, is_clamped=True),
    "Llama4TextExperts": ExpertsFamily(router="router", is_transposed=False, weighs_inputs=True),
    "MixtralExperts": ExpertsFamily(),
    "OlmoeExperts": ExpertsFamily(),
    "Qwen2MoeExperts": ExpertsFamily(),
    "Qwen3MoeExperts": ExpertsFamily(),
    "Qwen3NextExperts": ExpertsFamily(),
})  # fmt: skip
"""By the class of the experts."""
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


def is_experts(module: nn.Module) -> bool:
    """Return whether a module looks like one of experts, of any class."""
    is_stack = any(each.dim() == _STACK_DIMS for each in module.parameters(recurse=False))
    return is_stack and "Expert" in type(module).__name__
