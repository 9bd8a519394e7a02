"""What the recipes of public runs say and the rows do not: optimizer, routing, recomputation.

Read in the recipes and skills of Megatron-Bridge at 067f987 (of the Moonlight runs at 600d069, of
the offload runs at e9f0dea).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moetune.domain.kernels import FUSED
from moetune.domain.optimizers import OptimizerName
from moetune.domain.training import Overlap, Recompute, TokenDispatcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Settings of a run, None for what its row says itself, and facts of the target that differ."""

    source: str
    optimizer: OptimizerName
    is_natural: bool = False
    dispatcher: TokenDispatcher | None = None
    overlap: Overlap | None = None
    recompute: tuple[Recompute, ...] | None = None
    vpp: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


_MOONLIGHT = Recipe(
    source="moonlight_16b_pretrain_8gpu_h100_bf16_config", optimizer="adam-bf16-moments",
    is_natural=True, dispatcher="all_to_all",
)  # fmt: skip
_NANO = Recipe(
    source="nemotron_3_nano_pretrain_16gpu_h100_bf16_config", optimizer="adam-bf16-grads",
    dispatcher="hybrid_ep", facts={"fuses_activations": False},
)  # fmt: skip
_SUPER = Recipe(
    source="nemotron_3_super_pretrain_64gpu_h100_bf16_config", optimizer="adam-bf16",
    dispatcher="hybrid_ep", recompute=("core_attn", "moe_act", "norm", "moe"),
    facts={"fuses_activations": False},
)  # fmt: skip
_QWEN3 = Recipe(
    source="awsome-distributed-ai, bench_qwen3_pretrain.py over v0.4.2 qwen3_moe.py",
    optimizer="adam", recompute=("full",),
)  # fmt: skip
_KIMI = replace(_QWEN3, source="awsome-distributed-ai, bench_kimi_k2_pretrain.py")
_QWEN3_1F1B = replace(_QWEN3, recompute=None, vpp=2, facts={"overlap_hidden": 0.0})
_KIMI_1F1B = replace(_QWEN3_1F1B, source=_KIMI.source)
"""Without overlap the scripts leave the recipes' full recomputation, or set it; with overlap they
drop it and make two stages a rank. It hides nothing: `run-ab-rawpods.sh` does not set
CUDA_DEVICE_MAX_CONNECTIONS, 32 in recipes that overlap."""
_AWS = {
    **{f"awsH100q30-{number}": _QWEN3 for number in (1, 3, 4, 6, 10, 12, 13, 15)},
    **{f"awsH100q30-{number}": _QWEN3_1F1B for number in (7, 9, 16, 17)},
    **{f"awsK2-{number}": _KIMI for number in (4, 6, 7, 9)},
    **{f"awsK2-{number}": _KIMI_1F1B for number in (1, 3)},
}
_PAI = Recipe(source="examples/qwen3/run_mcore_qwen3.sh at 2b201af", optimizer="adam", facts={
    "logit_bytes": 10, "kernels": replace(FUSED, has_flash2=True, rows=(1, 1))})  # fmt: skip
"""It sets `--attention-backend flash`, `--cross-entropy-loss-fusion` and no `--moe-permute-fusion`:
sums of rows, in the unpermute and behind the permute, read and write what they add to."""
RECIPES: Mapping[str, Recipe] = {
    **_AWS,
    **dict.fromkeys(("pai1", "pai2"), _PAI),
    **{f"rc-moon{number}": _MOONLIGHT for number in range(1, 7)},
    "card4": Recipe(
        source="perf_recipes/qwen/h100/qwen3_moe.py", optimizer="adam-bf16-grads",
        dispatcher="hybrid_ep", overlap="batch",
    ),
    "card16": _SUPER,
    "card17": replace(_SUPER, is_natural=True),
    **{
        f"nano-{name}": _NANO
        for name in ("moe", "moe-norm", "none", "core_attn", "moe_act", "norm,moe_act")
    },
    "offload-0": Recipe(
        source="qwen3_30b_a3b_pretrain_config", optimizer="adam", is_natural=True,
        recompute=("full",),
    ),
}  # fmt: skip
_SKILLS = "NVIDIA-NeMo/Megatron-Bridge@067f987 skills/nemo-mbridge-perf-"
_EMPTY = dict.fromkeys(
    ("vpp", "etp", "dispatcher", "overlap", "recompute", "routing", "tflops_gpu", "note"), ""
)
_NANO_ROW = {
    "source": f"{_SKILLS}activation-recompute/SKILL.md", "model": "nemotron-3-nano", "seq": "8192",
    "gbs": "16", "tp": "1", "pp": "1", "ep": "8",
}  # fmt: skip
_OF_16_H100 = {
    **_EMPTY, "hardware": "H100", "framework": "Megatron-Bridge", "precision": "bf16",
    "gpus": "16", "cp": "1", "mbs": "1", "tok_s_gpu": "",
}  # fmt: skip
MORE_ROWS: tuple[Mapping[str, str], ...] = tuple(
    {**_OF_16_H100, **row}
    for row in (
        {**_NANO_ROW, "id": "nano-moe", "recompute": "moe", "step_s": "0.65742",
         "mem_gib": "64.653"},
        {**_NANO_ROW, "id": "nano-moe-norm", "recompute": "norm,moe", "step_s": "0.67762",
         "mem_gib": "63.639"},
        {"id": "offload-0", "source": f"{_SKILLS}cpu-offloading/card.yaml",
         "model": "qwen3-30b-a3b", "seq": "4096", "gbs": "8", "tp": "2", "pp": "2", "ep": "4",
         "step_s": "0.996", "mem_gib": "47.2"},
    )
)  # fmt: skip
"""Runs with memory that `layouts.csv` has not; the batch of offload-0 is that of its command."""
OUT_OF_MEMORY: tuple[Mapping[str, str], ...] = tuple(
    {**_OF_16_H100, **_NANO_ROW, "id": f"nano-{recompute}", "recompute": recompute,
     "step_s": "inf", "mem_gib": ""}
    for recompute in ("none", "core_attn", "moe_act", "norm,moe_act")
)  # fmt: skip
"""Runs that ended in an out-of-memory error on 80 GB."""
