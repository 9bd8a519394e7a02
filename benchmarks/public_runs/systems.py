"""Systems of public runs: their runtime, what they do unless a row says otherwise, and devices."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from moetune.domain.kernels import FUSED
from moetune.domain.optimizers import OptimizerName
from moetune.domain.targets import TargetName
from moetune.domain.training import Recompute, TokenDispatcher, TrainingDtype, ZeroStage

MemoryScope = Literal["allocated", "reserved", "device"]
"""Of a printed peak: tensors, what the allocator reserved, or all of the device (`nvidia-smi`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device of public runs.

    Args:
        profile: of its reference machine.
        memory_bytes: where it has another memory than the profile's.
    """

    profile: str
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """What a system's runs have where their rows say nothing.

    Args:
        recompute: of the recipes; `selective` is its word of that name.
        etp_is_tp: whether experts are cut like everything else (Megatron-Core's default).
        facts: of the target, where the system's are others than what moetune exports.
    """

    target: TargetName
    dispatcher: TokenDispatcher = "all_to_all"
    optimizer: OptimizerName = "adam"
    dtype: str = "bf16"
    zero: ZeroStage = 1
    recompute: tuple[Recompute, ...] = ()
    selective: tuple[Recompute, ...] = ("core_attn",)
    is_natural: bool = False
    etp_is_tp: bool = False
    memory_scope: MemoryScope = "allocated"
    hides_tensor_comm: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)

    def etp(self, tp: int, num_moe_layers: int) -> int:
        """Return the ranks that share an expert's width."""
        return tp if self.etp_is_tp and num_moe_layers else 1

    def facts_of(self, release: str, dtype: TrainingDtype) -> dict[str, Any]:
        """Return what of the target's facts a release of the system has otherwise."""
        is_scaled = dtype == "fp8" and release.endswith(_SCALED_RELEASES)
        return {**self.facts, **(_CURRENT_SCALING if is_scaled else {})}


_GATHERS_NARROW = MappingProxyType({"caches_narrow_weights": False})
"""Performance recipes set fp8_param_gather (`MixedPrecisionConfig` of Megatron-Bridge and NeMo)."""
_FUSED_LOSS = MappingProxyType({"logit_bytes": 2})
"""Transformer Engine's: NeMo, scripts/performance/helpers.py; ModelZoo, model_configs."""
_CURRENT_SCALING = MappingProxyType({"kernels": replace(FUSED, scale_bytes=2.0)})
"""Of 8 bits in NeMo 25.04 to Bridge 25.09, whose pages say per-tensor current scaling: a kernel of
its own computes each factor's largest value. Transformer Engine 2.7, of 25.09, has it in its norms
(#2013) and activations (#2004), but not for experts. NeMo 25.02 has version 2.0, without it."""
_SCALED_RELEASES = "25.04", "25.07", "25.08", "25.09"
_TITAN = System(
    target="torchtitan", zero=3, recompute=("selective",), selective=("selective",),
    is_natural=True, memory_scope="reserved",
)  # fmt: skip
CHUNKED_LOSS = "2026-04-27"
"""When torchtitan began to compute its loss in chunks (#2937)."""
_SYSTEMS: Mapping[str, System] = {
    "Megatron-Bridge (own recipe)": System(
        target="bridge", optimizer="adam-bf16-grads", facts=_GATHERS_NARROW
    ),
    "Megatron-Bridge": System(
        target="bridge", optimizer="adam-bf16-grads", facts=_GATHERS_NARROW, hides_tensor_comm=True,
    ),
    "NeMo 2": System(
        target="megatron", optimizer="adam-bf16-grads", etp_is_tp=True,
        facts=_GATHERS_NARROW | _FUSED_LOSS, hides_tensor_comm=True,
    ),
    "NeMo / Megatron-Core": System(
        target="megatron", optimizer="adam-bf16-grads", etp_is_tp=True, facts=_GATHERS_NARROW,
        hides_tensor_comm=True,
    ),
    "Megatron-LM": System(target="megatron", is_natural=True, etp_is_tp=True),
    "mcore": System(target="megatron", optimizer="adam-bf16", facts=_FUSED_LOSS),
    "Megatron-SWIFT": System(target="megatron"),
    "DeepSpeed": System(target="deepspeed", zero=3, is_natural=True),
    "Megatron-LM dev": System(target="megatron", optimizer="adam-bf16", facts=_FUSED_LOSS),
    "Primus": System(target="megatron", memory_scope="device"),
    "Skywork-Megatron": System(target="megatron", etp_is_tp=True),
    "torchtitan": _TITAN,
    "Transformers": System(target="transformers", zero=3, recompute=("full",), is_natural=True),
}  # fmt: skip
"""By the first words of the framework."""
_GIB = 2**30
DEVICES: Mapping[str, Device] = {
    "H100-95GB": Device(profile="h100-96gb-x8", memory_bytes=int(94.99 * _GIB)),
    "H100 96GB": Device(profile="h100-96gb-x8", memory_bytes=int(94.99 * _GIB)),
    "H100": Device(profile="h100-x8"),
    "H800": Device(profile="h800-x8"),
    "H200": Device(profile="h200-x8"),
    "A100": Device(profile="a100-x8"),
    "GB200": Device(profile="gb200-nvl72"),
    "GB300": Device(profile="gb300-nvl72"),
    "276 GiB card": Device(profile="gb300-nvl72", memory_bytes=int(276.62 * _GIB)),
    "B200": Device(profile="b200-x8"),
    "B300": Device(profile="b300-x8"),
    "MI300X": Device(profile="mi300x-x8"),
    "MI355X": Device(profile="mi355x-x8"),
}
"""By the first words of a row's GPU, the longer ones first."""


def system_of(framework: str) -> System:
    """Return the system of a framework.

    Raises:
        ValueError: it is none of the planner's runtimes.
    """
    for words in sorted(_SYSTEMS, key=len, reverse=True):
        if framework.startswith(words):
            return _SYSTEMS[words]
    raise ValueError(f"{framework} is none of the planner's runtimes")
