"""Stand-ins for the classes of torchtitan 0.3 that the adapter takes, where it is not installed.

They have what tests call and no more. `benchmarks/titan` runs torchtitan's own, and
the tests do so, too, in an environment that has it.
"""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn


class Configurable:
    """What is built from a nested `Config`."""

    @dataclass(kw_only=True)
    class Config:
        _owner: ClassVar[Any] = None

        def build(self) -> Any:
            return self._owner(replace(self))

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "Config" in vars(cls):
            vars(cls)["Config"]._owner = cls


class Dispatcher(Configurable):
    """A token dispatcher, which knows its mesh and never dispatches here."""

    @dataclass(kw_only=True)
    class Config(Configurable.Config):
        num_experts: int
        top_k: int

    def __init__(self, config: Config) -> None:
        self.top_k = config.top_k
        self.ep_mesh: object = None


class AllToAllTokenDispatcher(Dispatcher):
    @dataclass(kw_only=True)
    class Config(Dispatcher.Config):
        pass


class LocalTokenDispatcher(Dispatcher):
    @dataclass(kw_only=True)
    class Config(Dispatcher.Config):
        pass


class GroupedExperts(nn.Module, Configurable):
    @dataclass(kw_only=True)
    class Config(Configurable.Config):
        dim: int
        hidden_dim: int
        num_experts: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.num_experts, dim, hidden = config.num_experts, config.dim, config.hidden_dim
        self.w1_EFD = nn.Parameter(torch.empty(self.num_experts, hidden, dim))
        self.w2_EDF = nn.Parameter(torch.empty(self.num_experts, dim, hidden))
        self.w3_EFD = nn.Parameter(torch.empty(self.num_experts, hidden, dim))


class GptOssGroupedExperts(GroupedExperts):
    @dataclass(kw_only=True)
    class Config(GroupedExperts.Config):
        swiglu_limit: float = 7.0

    def __init__(self, config: Config) -> None:
        nn.Module.__init__(self)
        num, dim, hidden = config.num_experts, config.dim, config.hidden_dim
        self.num_experts, self.swiglu_limit = num, config.swiglu_limit
        self.mlp1_weight_EGD = nn.Parameter(torch.empty(num, hidden * 2, dim))
        self.mlp1_bias_EG = nn.Parameter(torch.empty(num, hidden * 2))
        self.mlp2_weight_EDF = nn.Parameter(torch.empty(num, dim, hidden))
        self.mlp2_bias_ED = nn.Parameter(torch.empty(num, dim))


class RoutedExperts(nn.Module, Configurable):
    @dataclass(kw_only=True)
    class Config(Configurable.Config):
        inner_experts: Any
        token_dispatcher: Any

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.inner_experts = config.inner_experts.build()
        self.token_dispatcher = config.token_dispatcher.build()

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        """Nothing, as torchtitan's own."""

    def parallelize(self, parallel_dims: Any) -> None:
        self.token_dispatcher.ep_mesh = parallel_dims.get_optional_mesh("ep")


class Linear(nn.Linear, Configurable):
    @dataclass(kw_only=True)
    class Config(Configurable.Config):
        in_features: int
        out_features: int

    def __init__(self, config: Config) -> None:
        super().__init__(config.in_features, config.out_features, bias=False)


class FeedForward(nn.Module, Configurable):
    @dataclass(kw_only=True)
    class Config(Configurable.Config):
        w1: Any
        w2: Any
        w3: Any

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (each.build() for each in (config.w1, config.w2, config.w3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))
        return y


class TokenChoiceTopKRouter(nn.Module, Configurable):
    @dataclass(kw_only=True)
    class Config(Configurable.Config):
        num_experts: int
        gate: Any
        top_k: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate, self.top_k = config.gate.build(), config.top_k

    def forward(self, x_BLD: torch.Tensor, _: object) -> tuple[torch.Tensor, ...]:
        scores_BLE = torch.sigmoid(self.gate(x_BLD))
        return (*scores_BLE.topk(self.top_k), scores_BLE)


class MoE(nn.Module, Configurable):
    @dataclass(kw_only=True)
    class Config(Configurable.Config):
        num_experts: int
        routed_experts: Any
        router: Any
        load_balance_coeff: float | None = None
        shared_experts: Any = None

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.routed_experts, self.router = config.routed_experts.build(), config.router.build()
        shared = config.shared_experts
        self.shared_experts = shared.build() if shared is not None else None
        self.expert_bias_E = None

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        scores_BLK, chosen_BLK, scores_BLE = self.router(x_BLD, self.expert_bias_E)
        routed = torch.zeros_like(scores_BLE, dtype=torch.bool).scatter_(-1, chosen_BLK, value=True)
        out_BLD: torch.Tensor = self.routed_experts(
            x_BLD, scores_BLK, chosen_BLK, routed.sum(dim=(0, 1))
        )
        if self.shared_experts is not None:
            out_BLD = out_BLD + self.shared_experts(x_BLD)
        return out_BLD


def override(**_options: object) -> Callable[[Any], Any]:
    return lambda factory: factory


def derive(source: Any, target: Any, **deltas: object) -> Any:
    common = {item.name: getattr(source, item.name) for item in fields(source)}
    return target(**{**common, **deltas})


def provide() -> None:
    """Let the adapter import the stand-ins, unless torchtitan is installed."""
    if "torchtitan" in sys.modules or importlib.util.find_spec("torchtitan") is not None:
        return
    contents: dict[str, dict[str, object]] = {
        "spmd_types": {"is_type_checking": lambda: False},
        "torchtitan": {},
        "torchtitan.config": {},
        "torchtitan.config.override": {"override": override, "derive": derive},
        "torchtitan.models": {},
        "torchtitan.models.common": {},
        "torchtitan.models.common.feed_forward": {"FeedForward": FeedForward},
        "torchtitan.models.common.linear": {"Linear": Linear},
        "torchtitan.models.common.moe": {
            "RoutedExperts": RoutedExperts, "GroupedExperts": GroupedExperts, "MoE": MoE,
            "TokenChoiceTopKRouter": TokenChoiceTopKRouter,
        },
        "torchtitan.models.common.token_dispatcher": {
            "AllToAllTokenDispatcher": AllToAllTokenDispatcher,
            "LocalTokenDispatcher": LocalTokenDispatcher,
        },
        "torchtitan.models.gpt_oss": {},
        "torchtitan.models.gpt_oss.moe": {"GptOssGroupedExperts": GptOssGroupedExperts},
    }  # fmt: skip
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        sys.modules[name] = module
        package, _, last = name.rpartition(".")
        if package:
            setattr(sys.modules[package], last, module)


def dims(mesh: object = None, *, tp: int = 1, ep: int = 1) -> Any:
    """Return what the adapter asks of torchtitan's `ParallelDims`."""
    return SimpleNamespace(
        tp=tp, ep=ep, spmd_backend="partial_dtensor", get_optional_mesh=lambda _: mesh
    )
