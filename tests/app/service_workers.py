"""What ranks do in the tests of the plan service: jobs that go on whatever happens to it."""

import os

import pytest
import torch
import torch.distributed as dist

import moetune
from moetune.domain.errors import InputError
from moetune.domain.plan import Decision
from moetune.runtime.moe.layer import MoELayer
from tests.runtime.faults import make
from tests.runtime.online_workers import train
from tests.runtime.workers import Heard, relative_error

INPUTS: dict[str, object] = {
    "layer": {"d_model": 8, "d_hidden": 16, "num_experts": 4, "top_k": 2},
    "tokens_per_rank": 40,
    "dtype": "float64",
}
PLANNED = Decision(forward_degree=4, backward_degree=4)
SAFE = Decision(forward_degree=1, backward_degree=1)


def step(layer: MoELayer, reference: MoELayer, decision: Decision) -> None:
    """Train one step, with the numbers of one chunk."""
    y = train(layer, 40)
    # One chunk is among the first steps of a job that has a plan.
    assert layer.decision in {decision, SAFE}
    assert relative_error(y, train(reference, 40)) <= 1e-12


def asks_together() -> None:
    """Train with the service's plan, without a word of the log."""
    heard = Heard()
    start_job(INPUTS, PLANNED)
    assert heard.lines == []


def does_without(gone: str) -> None:
    """Only the first rank knows of a service and has the cache; whatever it meets, all share.

    Args:
        gone: where a service was; before that the one of MOETUNE_URL never answers.
    """
    is_first = dist.get_rank() == 0
    if not is_first:
        for name in ("MOETUNE_URL", "MOETUNE_TOKEN", "XDG_CACHE_HOME"):
            del os.environ[name]
    heard = Heard()
    start_job({**INPUTS, "tokens_per_rank": 80}, SAFE)
    assert ["no answer" in line for line in heard.lines] == [True] * is_first
    heard.lines.clear()
    if is_first:
        os.environ["MOETUNE_URL"] = gone
    start_job(INPUTS, PLANNED)
    assert [line.count("refused, 3 tries") for line in heard.lines] == [1] * is_first
    if is_first:
        os.environ["MOETUNE_URL"] = "ftp://planner"
    with pytest.raises(InputError, match="MOETUNE_URL"):
        moetune.open_planbook(INPUTS)


def start_job(inputs: dict[str, object], decision: Decision) -> None:
    """Begin a job of two layers."""
    book = moetune.open_planbook(inputs)
    reference = make(pipeline=False, dtype=torch.float64)
    for _ in range(2):
        step(make(pipeline=True, plan=book, dtype=torch.float64), reference, decision)
