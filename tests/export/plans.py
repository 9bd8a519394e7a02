"""Training plans to export: documents as `moetune plan --output` writes them."""

import ast
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from moetune.app.export import ExportDocument, export_plan
from moetune.app.files import load_plan_file

KNOWN = Path(__file__).parent / "known"
LAYOUT: dict[str, Any] = {
    "dp": 256, "cp": 1, "tp": 1, "pp": 1, "vpp": 1, "ep": 32, "etp": 1, "edp": 8, "micro_batch": 1,
    "recompute": ["full"], "dispatcher": "all_to_all", "overlap": "none", "zero": 3,
    "cuda_graphs": "none",
}  # fmt: skip
PIPELINE: dict[str, Any] = {
    **LAYOUT, "dp": 8, "tp": 4, "pp": 8, "vpp": 4, "edp": 1, "recompute": ["moe_act", "norm"],
    "dispatcher": "deepep", "overlap": "batch", "zero": 1,
}  # fmt: skip
QWEN: dict[str, Any] = {"model": "qwen3-235b-a22b", "world_size": 256, "global_batch": 2048}
DEEPSEEK: dict[str, Any] = {"model": "deepseek-v3", "world_size": 1024, "global_batch": 8192}


def plan_document(
    layout: dict[str, Any], model: dict[str, Any] = QWEN, **inputs: object
) -> dict[str, Any]:
    return {
        "schema": "moetune.training-plan/1",
        "id": "0123456789abcdef" * 4,
        "inputs": {"seq": 4096, "dtype": "bfloat16", "profile": "h100-x8", "target": "megatron",
                   "pins": {}, "memory_limit_bytes": 1, **model, **inputs},
        "layout": layout,
        "predicted": {"step_seconds": 2.0, "parts": {"experts": 1.5, "exchange": 0.5}},
        "memory": {"peak_bytes": 2**30, "parts": {"parameters": 2**30}},
        "confidence": {"probability_best": 0.5, "expected_regret": 0.01, "p05_step_seconds": 1.8,
                       "p95_step_seconds": 2.4},
        "fits": True,
    }  # fmt: skip


def exported(folder: Path, to: str, document: object) -> ExportDocument:
    path = folder / "plan.json"
    text = document if isinstance(document, str) else json.dumps(document)
    path.write_text(text, encoding="utf-8")
    return export_plan(
        load_plan_file(path).as_model(), to=to, model=None, stores=lambda: nullcontext(None)
    )


def known(package: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((KNOWN / f"{package}.json").read_text(encoding="utf-8"))
    return facts


def deepspeed_config(text: str) -> dict[str, Any]:
    """Return DeepSpeed's configuration as the exported program has it."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "CONFIG":
            assert node.value is not None
            config: dict[str, Any] = ast.literal_eval(node.value)
            return config
    raise AssertionError("the program has no CONFIG")
