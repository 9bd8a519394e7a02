"""torchtitan's own trainer on two CPU ranks: losses and steps with its exchange and with moetune's.

    pip install torchtitan==0.3.0 triton     # beside moetune, in an environment of its own
    PYTHONPATH=. python -m benchmarks.titan

Runs of one name have the same seed, text and configuration, and differ in one override. It prints
a table: the largest relative difference of losses and of norms of gradients from those of
torchtitan's own exchange, and the CPU time of the fastest step but the first, of the slower rank.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from moetune.workflows.ports import free_port

_RANKS = 2
_EXPERTS = (
    "--d-model 256 --d-hidden 768 --num-experts 64 --top-k 8 --activation swiglu --world-size 2 "
    "--allow-modelled"
)
_PLANS = {
    "float32": "--profile rtx2080ti-x64 --dtype float32 --forward-degree 4 --backward-degree 2 "
    "--strategy S4",
    "bfloat16": "--profile h100-x8 --dtype bfloat16 --forward-degree 4 --backward-degree 3",
}
"""Degrees are pinned: the best ones of these machines for so few tokens are one chunk."""


def runs(steps: int, tokens: int, plans: dict[str, str]) -> list[dict[str, Any]]:
    """Return all runs, those of one name together, torchtitan's own exchange first."""
    common = {"batch": 1, "seq_len": tokens, "steps": steps, "layers": 2, "ep": _RANKS}
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("qwen3", "float32", {}), ("qwen3", "float32", {"checkpointing": "full"}),
        ("qwen3", "float32", {"checkpointing": "selective"}), ("qwen3", "float32", {"tp": 2}),
        ("deepseek_v3", "float32", {}), ("qwen3", "bfloat16", {}), ("deepseek_v3", "bfloat16", {}),
    ]  # fmt: skip
    made = []
    for model, dtype, more in cases:
        base = {**common, "model": model, "dtype": dtype, **more}
        made += [{**base, "exchange": "torchtitan"}, {**base, "exchange": "moetune"}]
        if model == "qwen3" and not more:
            made.append({**base, "exchange": "moetune", "plan": plans[dtype]})
        if model == "deepseek_v3":
            made.append({**base, "exchange": "moetune", "shared": True})
    return made


def plans_of(folder: Path, tokens: int) -> dict[str, str]:
    """Return the paths of new plans for the experts of torchtitan's qwen3 debug model."""
    moetune = [sys.executable, "-m", "moetune", "--db", f"sqlite:///{folder}/moetune.db"]
    found = {}
    for dtype, pins in _PLANS.items():
        path = str(folder / f"{dtype}.json")
        arguments = f"plan {_EXPERTS} --tokens {tokens} {pins} --output {path}"
        subprocess.run([*moetune, *arguments.split()], check=True, stdout=subprocess.DEVNULL)
        found[dtype] = path
    return found


def train(folder: Path, wanted: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Train the runs, and return what every rank gives."""
    (folder / "runs.json").write_text(json.dumps(wanted), encoding="utf-8")
    launched = dict(
        os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE=str(_RANKS),
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    job = [sys.executable, "-W", "ignore", "-m", "benchmarks.titan.job", str(folder / "runs.json")]
    ranks = []
    for rank in range(_RANKS):
        environment = {**launched, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        log = (folder / f"log-{rank}").open("w", encoding="utf-8")
        ranks.append(subprocess.Popen([*job, str(folder)], env=environment, stdout=log, stderr=log))
    codes = [process.wait() for process in ranks]
    if any(codes):
        sys.exit((folder / f"log-{codes.index(max(codes))}").read_text(encoding="utf-8"))
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(_RANKS)]


def table(ranks: list[list[dict[str, Any]]]) -> str:
    """Return the rows in Markdown."""
    lines = [
        "| model | tokens | | exchange | last loss | losses differ | norms differ | CPU ms |",
        "|---|---|---|---|---:|---:|---:|---:|",
    ]
    own: dict[str, Any] = {}
    for both in zip(*ranks, strict=True):
        run = both[0]
        own = run if run["exchange"] == "torchtitan" else own
        assert run["names"] == own["names"], "the parameters have other names"  # noqa: S101
        more = f"tp {run['tp']}" if "tp" in run else run.get("checkpointing", "")
        seconds = max(min(cpu for _, cpu in each["seconds"][1:]) for each in both)
        exchange = run["exchange"] + (", plan" if "plan" in run else "")
        exchange += ", shared experts beside" if "shared" in run else ""
        lines.append(
            f"| {run['model']} | {run['dtype']} | {more} | {exchange} | {run['losses'][-1]:.6f} | "
            f"{_difference(run, own, 'losses'):.1e} | {_difference(run, own, 'norms'):.1e} | "
            f"{seconds * 1e3:.0f} |"
        )
    return "\n".join(lines)


def _difference(run: dict[str, Any], own: dict[str, Any], name: str) -> float:
    pairs = zip(run[name], own[name], strict=True)
    most: float = max(abs(one - other) / abs(other) for one, other in pairs)
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description="torchtitan's trainer with moetune's exchange")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=256, help="of one rank and step")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wanted = runs(options.steps, options.tokens, plans_of(folder, options.tokens))
        print(table(train(folder, wanted)))


if __name__ == "__main__":
    main()
