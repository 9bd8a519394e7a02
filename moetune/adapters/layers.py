"""The modules of transformers and torchtitan that hold experts, and the layer of each.

A table has a row with the parameters, the form and the router of each class of experts. The names
are those of transformers 5.20 and newer. There the experts are one module with fused parameters,
and a block calls them with its router's choices and weights. Nothing of torchtitan is imported: the
parameters' names and layouts say which experts they are.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moetune.comm.group import Communicator
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape, check_divisible
from moetune.runtime.moe.activations import ClampedGate, FusedForm, GateFunction
from moetune.runtime.moe.decisions import dtype_name
from moetune.runtime.moe.expert_module import BorrowedExperts, ExpertNames
from moetune.runtime.moe.layer import RoutedLayer
from moetune.runtime.moe.placement import ExpertPlacement
from moetune.runtime.plans.book import GivenPlan, PlanBook, plans_of

_AUTOCAST = "bfloat16", "float16"
"""The dtypes that autocast may give a step with float32 parameters."""
_FUNCTIONS: MappingProxyType[str, GateFunction] = MappingProxyType({
    "SiLU": "silu", "SiLUActivation": "silu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh",
    "ReLU": "relu",
})  # fmt: skip
"""The names of gate functions, by the class of a module's activation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsFamily:
    """The parameter names and the form of one class of experts.

    Args:
        names: names of the experts' parameters; experts with a `factor` are swiglu.
        router: name of the router in the block of the experts.
        is_transposed: parameters are (E, out, in).
        clamp: returns the clamped, interleaved gate of gpt-oss; None for other classes.
        weighs_inputs: the router's weights multiply the experts' inputs, not their results.
    """

    names: ExpertNames = field(default_factory=ExpertNames)
    router: str = "gate"
    is_transposed: bool = True
    clamp: Callable[[Any], ClampedGate] | None = None
    weighs_inputs: bool = False

    def form(self, experts: Any) -> FusedForm | None:  # noqa: ANN401 - a module of either library
        """Return the experts' fused form; None for three separate matrices.

        Raises:
            InputError: the runtime lacks their activation.
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
"""The known classes of experts, by class name."""
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
"""The number of dimensions of parameters with a matrix for each expert."""


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
    """Return whether a module looks like a module of experts, of any class."""
    is_stack = any(parameter.dim() == _STACK_DIMS for parameter in module.parameters(recurse=False))
    return is_stack and "Expert" in type(module).__name__


def shape_of(
    experts: nn.Module, family: ExpertsFamily, *, top_k: int, num_experts: int | None = None
) -> LayerShape:
    """Return the shape of a layer with all its experts, as plans record it.

    Args:
        experts: parameters of all experts, or DTensors.
        top_k: experts that the router chooses for each token.
        num_experts: experts of all ranks, given if the parameters may be only this rank's.

    Raises:
        InputError: the runtime lacks the experts' activation.
    """
    family.form(experts)
    up, down = (experts.get_parameter(name) for name in (family.names.up, family.names.down))
    inputs = 2 if family.is_transposed else 1
    return LayerShape(
        d_model=up.shape[inputs], d_hidden=down.shape[inputs],
        num_experts=len(up) if num_experts is None else num_experts,
        top_k=1 if family.weighs_inputs else top_k, activation="swiglu",
    )  # fmt: skip


def dtype_of(experts: nn.Module, family: ExpertsFamily) -> torch.dtype:
    """Return the dtype of a module's experts."""
    return experts.get_parameter(family.names.up).dtype


def check_dtype(plan: GivenPlan, dtype: torch.dtype) -> None:
    """Raise InputError unless the plan is for this dtype, or a narrower dtype under autocast."""
    if plan is None or isinstance(plan, PlanBook):
        return
    plans, name = plans_of(plan), dtype_name(dtype)
    fitting = {name, *(_AUTOCAST if dtype == torch.float32 else ())}
    if any(planned.workload.dtype in fitting for planned in plans):
        return
    dtypes = ", ".join(sorted({planned.workload.dtype for planned in plans}))
    raise InputError(
        f"plan {plans[0].id[:6]} is for {dtypes}, the experts are {name}",
        f"make a plan with `moetune plan --dtype {name}`",
    )


def routed_layer(
    experts: nn.Module,
    family: ExpertsFamily,
    shape: LayerShape,
    plan: GivenPlan,
    communicator: Communicator,
    *,
    mesh: DeviceMesh | None = None,
    are_wrapped: bool = False,
) -> tuple[RoutedLayer, BorrowedExperts]:
    """Return the layer of a module's experts, which are not cut to this rank's yet.

    Args:
        communicator: joins the ranks that share the experts.
        mesh: the same ranks, or replicas and these ranks; None if the caller has no mesh.
        are_wrapped: the model's library shards and wraps the experts itself.
    """
    placement = ExpertPlacement.of(communicator, shape.num_experts)
    form = family.form(experts)
    mine = BorrowedExperts(experts, family.names, form, placement, are_wrapped=are_wrapped)
    return RoutedLayer(shape, mine, communicator, plan=plan, mesh=mesh), mine


def wrapped_layer(
    experts: nn.Module,
    family: ExpertsFamily,
    shape: LayerShape,
    plan: GivenPlan,
    communicator: Communicator,
) -> RoutedLayer:
    """Return the layer of experts that another library shards and wraps; all ranks agree on it.

    Args:
        experts: their parameters are this rank's, or DTensors of all experts, whenever the layer
            runs.
        plan: as in `moetune.adapt`.
        communicator: joins the ranks that share the experts; all of them call this.

    Raises:
        InputError: the ranks do not divide the experts, or the plan is for another layer, dtype or
            number of ranks.
        RankMismatchError: the ranks have different plans, or only some can use theirs.
        CollectiveError: the exchange failed.
    """
    check_divisible(shape.num_experts, communicator.num_ranks)
    check_dtype(plan, dtype_of(experts, family))
    layer, _ = routed_layer(experts, family, shape, plan, communicator, are_wrapped=True)
    layer.agree_on_plans()
    return layer
