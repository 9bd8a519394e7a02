"""How soon *New plan* shows a model's plan and its front, asked as the page does: two minutes.

python -m benchmarks.new_plan          prints the table of docs/results/first-hour.md
"""

import re
import statistics
import tempfile
import time
from html import unescape
from pathlib import Path

import httpx

from benchmarks.service.__main__ import served

_CASES = (
    ("olmoe", 8, 32, "megatron"),
    ("gpt-oss-20b", 16, 64, "megatron"),
    ("deepseek-v2-lite", 32, 256, "megatron"),
    ("qwen3-30b-a3b", 64, 512, "megatron"),
    ("mixtral-8x7b", 64, 256, "megatron"),
    ("glm-4.5-air", 128, 512, "megatron"),
    ("kimi-k2", 512, 2048, "megatron"),
    ("deepseek-v3", 256, 1024, "megatron"),
    ("olmoe", 8, 32, "moetune"),
    ("qwen3-30b-a3b", 64, 512, "moetune"),
    ("deepseek-v3", 512, 2048, "torchtitan"),
)
"""(model, ranks, global batch, target); batches half and twice as large are asked for, too."""
_REST_SECONDS = 1.0
"""Between two questions: a solver collects what the last one left behind once nobody asks."""


def main() -> None:
    """Ask for every case, and print its row: medians of three global batches."""
    print("| model | ranks | target | answer | front | both | longest |")
    print("|---|---:|---|---:|---:|---:|---:|")
    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder) / "moetune.db") as url,
        httpx.Client(base_url=url, timeout=60.0) as client,
    ):
        _seconds(client, _fields("olmoe", 8, 8, "megatron"))  # solvers start
        for model, ranks, batch, target in _CASES:
            found = [
                _seconds(client, _fields(model, ranks, each, target))
                for each in (batch // 2, batch, batch * 2)
            ]
            answer, front = map(statistics.median, zip(*found, strict=True))
            every = [sum(each) for each in found]
            print(
                f"| {model} | {ranks} | {target} | {answer:.2f} s | {front:.2f} s "
                f"| {statistics.median(every):.2f} s | {max(every):.2f} s |",
                flush=True,
            )


def _fields(model: str, ranks: int, batch: int, target: str) -> dict[str, str]:
    return {
        "kind": "model", "decoder": model, "profile": "h100-x8", "world_size": str(ranks),
        "global_batch": str(batch), "seq": "4k", "target": target,
    }  # fmt: skip


def _seconds(client: httpx.Client, fields: dict[str, str]) -> tuple[float, float]:
    """Return the seconds until the answer is there, and those until its front is, behind it."""
    time.sleep(_REST_SECONDS)
    start = time.perf_counter()
    page = client.get("/new/answer", params=fields).raise_for_status()
    answered = time.perf_counter()
    [address] = re.findall(r'<a href="(/new/front[^"]*)"', page.text)
    client.get(unescape(address)).raise_for_status()
    return answered - start, time.perf_counter() - answered


if __name__ == "__main__":
    main()
