"""Questions that take the solver a second, and ones that take it minutes."""

from typing import Any

import httpx

SMALL = {"model": "gpt-s", "profile": "rtx2080ti-x64"}


def big(number: int = 0) -> dict[str, Any]:
    """A what-if of a model of 1,024 layers on 16,384 ranks; each number is another one."""
    inputs = {
        "num_layers": 1024 - number, "num_heads": 64, "seq": 2048, "vocab": 51200,
        "d_model": 4096, "d_hidden": 16384, "num_experts": 64, "top_k": 2,
        "profile": "v100-x256", "world_size": 2**14, "global_batch": 2**20,
    }  # fmt: skip
    return {"inputs": inputs, "changes": {"memory_limit_bytes": 2**35}}


def code_of(answer: httpx.Response) -> tuple[int, str]:
    """Status and title of an answer that is a problem."""
    return answer.status_code, answer.json()["title"]
