"""Documents of training plans, small and whole."""

from typing import Any

from moetune.domain.any_plan import plan_from_document
from moetune.domain.training_document import TrainingDocument

TRAINING: dict[str, Any] = {
    "schema": "moetune.training-plan/1",
    "id": "0123456789abcdef" * 4,
    "inputs": {
        "model": "olmoe", "world_size": 16, "global_batch": 64, "seq": 4096, "dtype": "bfloat16",
        "routing": "balanced", "optimizer": "adam", "profile": "h100-x8",
        "profile_fingerprint": "ab" * 32, "target": "megatron", "pins": {"tp": 2},
        "memory_limit_bytes": 2**36,
    },
    "layout": {
        "dp": 4, "cp": 1, "tp": 2, "pp": 2, "vpp": 1, "ep": 8, "etp": 1, "edp": 1,
        "micro_batch": 1, "recompute": ["none"], "dispatcher": "deepep", "overlap": "batch",
        "zero": 1, "cuda_graphs": "none", "offload_activations": 0.25, "offload_optimizer": 0.5,
        "schedule": "1f1b", "stages": "Et*8|t*8L",
    },
    "predicted": {
        "step_seconds": 2.0, "tokens_per_second_per_device": 8192.0,
        "model_tflops_per_device": 300.0,
        "parts": {"experts": 1.5, "exchange": 0.25, "bubble and sends": 0.25},
        "saved_by_overlap_seconds": 0.5,
    },
    "memory": {
        "peak_bytes": 2**35, "host_bytes": 2**30, "rank": 0,
        "parts": {"parameters": 2**34, "activations": 2**34}, "activations": {"experts": 2**34},
    },
    "confidence": {
        "probability_best": 0.5, "expected_regret": 0.01, "p05_step_seconds": 1.8,
        "p95_step_seconds": 2.4,
    },
    "fits": True,
    "trust": "modelled",
    "warnings": ["one stand-in"],
    "alternatives": [],
}  # fmt: skip


def training_plan(**changes: object) -> TrainingDocument:
    """Return a training plan with other parts."""
    return plan_from_document(TRAINING | changes).as_model()
