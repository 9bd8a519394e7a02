"""The rank program on real ranks: what it times, in which order, and what it refuses."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.netlab.experiment import steps_command
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.peers import peer_env
from moetune.domain.layer import LayerShape

pytestmark = pytest.mark.dist
_PEERS = Path(__file__).parents[2] / ".peers"

_TIMES = """
import json, time
import torch.distributed as dist
from benchmarks.netlab.ranks import time_steps
dist.init_process_group("gloo")
calls = []
def step(name, seconds):
    def run():
        calls.append(name)
        time.sleep(seconds)
    return run
own = 0.05 if dist.get_rank() == 1 else 0.0
times = time_steps({"a": step("a", own), "b": step("b", 0.02), "c": step("c", 0.0)}, rounds=4)
print(json.dumps([times, calls]))
dist.destroy_process_group()
"""


def test_every_cell_and_variant_gets_one_line_with_every_round() -> None:
    variants = ["ours:1", "ours:3", "bare", "ffn", "bare_collectives", "bare_gemms"]
    lines = _run(variants, tokens=(16, 48))
    assert [(line["tokens"], line["variant"]) for line in lines] == [
        (tokens, variant) for tokens in (16, 48) for variant in variants
    ]
    for line in lines:
        assert len(line["seconds"]) == 2
        assert all(seconds > 0 for seconds in line["seconds"])
        assert 1 <= line["imbalance"] < 4


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.skipif(
    not (_PEERS / "requirements.txt").is_file(),
    reason="DeepSpeed is not installed: `make netlab` does it",
)
def test_deepspeed_with_our_weights_gives_our_outputs(top_k: int) -> None:
    lines = _run(["ours:2", "deepspeed"], tokens=(24,), top_k=top_k)
    assert [line["variant"] for line in lines] == ["ours:2", "deepspeed"]


def test_steps_take_turns_and_the_slowest_rank_counts() -> None:
    with Lab(num_ranks=2, rate_mbit=None) as lab:
        outputs = lab.run([sys.executable, "-c", _TIMES], timeout_seconds=60)
    seen = [json.loads(output.stdout) for output in outputs]
    assert seen[0] == seen[1]
    times, calls = seen[0]
    rounds = ["".join(calls[at : at + 3]) for at in range(0, 12, 3)]
    assert all(sorted(times) == ["a", "b", "c"] for times in rounds)
    assert len(set(rounds)) > 1
    assert all(seconds >= 0.05 for seconds in times["a"])
    assert all(seconds >= 0.02 for seconds in times["b"])


def _run(variants: list[str], *, tokens: tuple[int, ...], top_k: int = 1) -> list[dict[str, Any]]:
    layer = LayerShape(d_model=8, d_hidden=16, num_experts=4, top_k=top_k, activation="relu")
    command = steps_command(layer=layer, tokens=tokens, variants=variants, rounds=2)
    with Lab(num_ranks=2, rate_mbit=None) as lab:
        outputs = lab.run(command, timeout_seconds=90, env=peer_env(_PEERS))
    assert outputs[1].stdout == ""
    return [json.loads(line) for line in outputs[0].stdout.splitlines()]
