"""How often scripts with a moetune layer end as they should, two ranks each.

    python -m benchmarks.clean_exit --runs 200 --torchrun 20

A rank that ends with another status than its script's, above all with SIGABRT, counts as failed.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from moetune.workflows.ports import free_port

_RESULT = Path(__file__).parents[1] / "docs/results/clean-exit.md"
_NUM_RANKS = 2
_PATIENCE_SECONDS = 300
_START = """
import torch
import torch.distributed as dist
import moetune

dist.init_process_group("gloo")
torch.manual_seed(0)
"""
_MOE = "moetune.MoELayer(d_model=32, d_hidden=64, num_experts=4, top_k=2, pipeline=2)"
_TENSOR = "moetune.TensorExpertLayer(d_model=32, d_hidden=64, num_experts=4, top_k=2)"
_DDP = """
moetune.prepare_ddp(model)
model = torch.nn.parallel.DistributedDataParallel(model)
"""
_STEPS = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(16, 32)).sum().backward()
    optimizer.step()
print("ended")
"""
_WITH_DDP = f"{_START}model = torch.nn.Sequential(torch.nn.Linear(32, 32), {_MOE}){_DDP}{_STEPS}"
_SCRIPTS: dict[str, tuple[int, str]] = {
    "MoELayer": (0, f"{_START}model = {_MOE}{_STEPS}"),
    "TensorExpertLayer": (0, f"{_START}model = {_TENSOR}{_STEPS}"),
    "MoELayer in DistributedDataParallel": (0, _WITH_DDP),
    "the same, destroy_process_group()": (0, _WITH_DDP + "dist.destroy_process_group()"),
    "TensorExpertLayer, sys.exit(3)": (
        3,
        f"{_START}model = {_TENSOR}{_STEPS}import sys; sys.exit(3)",
    ),
    "TensorExpertLayer, an exception": (
        1,
        f"{_START}model = {_TENSOR}{_STEPS}raise ValueError('of the script')",
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the scripts in turn and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200, help="launches with plain variables")
    parser.add_argument("--torchrun", type=int, default=20, help="launches with torchrun")
    options = parser.parse_args(arguments)
    clean: dict[tuple[str, str], list[bool]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for launcher, runs in (("variables", options.runs), ("torchrun", options.torchrun)):
            for run in range(runs):
                name = list(_SCRIPTS)[run % len(_SCRIPTS)]
                clean.setdefault((name, launcher), []).append(_ends(name, launcher, folder))
    _RESULT.write_text(_table(clean))


def _ends(name: str, launcher: str, folder: str) -> bool:
    status, text = _SCRIPTS[name]
    script = Path(folder) / "script.py"
    script.write_text(text)
    run = _with_torchrun if launcher == "torchrun" else _with_variables
    statuses, output = run(script)
    # torchrun ends with 1 whatever its ranks ended with, and names what that was.
    has_failed = "terminate called" in output or "SIGABRT" in output
    expected = status if launcher == "variables" else min(status, 1)
    is_clean = set(statuses) == {expected} and not has_failed
    if not is_clean:
        print(f"{name} by {launcher}: {statuses}\n{output[-2000:]}", flush=True)
    return is_clean


def _with_torchrun(script: Path) -> tuple[tuple[int, ...], str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(_NUM_RANKS)]
    done = subprocess.run(
        [*command, "--master-port", str(free_port()), str(script)],
        env=_variables(), capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    return (done.returncode,), done.stdout + done.stderr


def _with_variables(script: Path) -> tuple[tuple[int, ...], str]:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=_variables() | address | {"RANK": str(rank), "WORLD_SIZE": str(_NUM_RANKS)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(_NUM_RANKS)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=_PATIENCE_SECONDS)[0] for rank in ranks]
    return tuple(rank.returncode for rank in ranks), "".join(outputs)


def _variables() -> dict[str, str]:
    alone = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MOETUNE_DISABLE": "1"}
    return {**os.environ, **alone}


def _table(clean: dict[tuple[str, str], list[bool]]) -> str:
    rows = [
        f"| {name} | {launcher} | {sum(runs)} of {len(runs)} |"
        for (name, launcher), runs in clean.items()
    ]
    every = [run for runs in clean.values() for run in runs]
    setting = (
        f"`python -m benchmarks.clean_exit`, {time.strftime('%Y-%m-%d')}: "
        f"{sum(every)} of {len(every)} launches of two ranks, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {os.cpu_count()} cores."
    )
    head = ["# Scripts that end as they should", "", setting, ""]
    return "\n".join([*head, "| script | launched by | clean |", "|---|---|---|", *rows, ""])


if __name__ == "__main__":
    main()
