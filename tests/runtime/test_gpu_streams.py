"""Layers on GPUs that are not the current one: every operation waits for what it needs."""

import contextlib

import pytest
import torch

from benchmarks.staged_link import HostStagedLink
from moetune.comm.group import Communicator, OneRank
from moetune.domain.constraints import Strategy
from moetune.domain.layer import Phase
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.trace import SpanRecorder
from tests.cuda_kit import FakeCuda
from tests.runtime.gpu_runs import (
    GPU,
    STRATEGIES,
    decision,
    moe_layer,
    on_every_rank,
    step,
    tensor_layer,
)


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_layer_waits_for_its_copies_and_exchanges(strategy: Strategy, degree: int) -> None:
    def program(_: FakeCuda) -> None:
        layer = moe_layer()
        layer.pin(decision(strategy, degree))
        for num_tokens in (24, 31, 24):
            step(layer, num_tokens=num_tokens)

    on_every_rank(program)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("activation", "num_experts"), [("relu", 4), ("swiglu", 4), ("relu", 2)])
def test_so_does_a_layer_with_other_experts(
    strategy: Strategy, activation: str, num_experts: int
) -> None:
    def program(_: FakeCuda) -> None:
        layer = MoELayer(8, 16, num_experts, 1, activation=activation, device=GPU)  # type: ignore[arg-type] # the grid holds plain strings
        layer.pin(decision(strategy))
        for _number in range(2):
            step(layer)

    on_every_rank(program)


def test_copies_of_activations_have_separate_streams() -> None:
    with FakeCuda() as cuda:
        layer = moe_layer(communicator=OneRank())
        layer.pin(decision("S1", 2))
        step(layer)
        lanes = {call.lane.name for call in cuda.operations if call.label == "copy_"}
        assert len([name for name in lanes if name.startswith("cuda:1's stream")]) == 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_so_does_a_rank_alone(strategy: Strategy) -> None:
    with FakeCuda():
        layer = moe_layer(communicator=OneRank())
        layer.pin(decision(strategy))
        for _number in range(2):
            step(layer)


def test_a_tensor_parallel_layer_waits_for_its_sums() -> None:
    def program(cuda: FakeCuda) -> None:
        layer = tensor_layer()
        layer.pin(decision())
        cuda.syncs.clear()
        stops = []
        for num_tokens in (24, 24, 17, 24):
            cuda.syncs.clear()
            step(layer, num_tokens=num_tokens)
            stops.append(list(cuda.syncs))
        assert stops == [["a copy"]] * 4  # tokens are counted in the ranks' agreement

    on_every_rank(program)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_layer_follows_its_input_to_another_device(strategy: Strategy) -> None:
    def program(_: FakeCuda) -> None:
        layer = moe_layer(device=None)
        layer.pin(decision(strategy))
        for device in (torch.device("cpu"), GPU, torch.device("cuda", 0)):
            for _number in range(2):
                step(layer.to(device), device)

    on_every_rank(program)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_caller_on_another_stream_gets_the_same_orders(strategy: Strategy) -> None:
    def program(_: FakeCuda) -> None:
        layer = moe_layer()
        layer.pin(decision(strategy))
        stream = torch.cuda.Stream(GPU)
        stream.wait_stream(torch.cuda.current_stream(GPU))
        with torch.cuda.stream(stream):
            for _number in range(2):
                step(layer)
        torch.cuda.current_stream(GPU).wait_stream(stream)

    on_every_rank(program)


class StepError(Exception):
    """As an out-of-memory error in the middle of a phase."""


class Faulty(SpanRecorder):
    """Lets the experts of one chunk fail."""

    def __init__(self, phase: Phase, chunk: int) -> None:
        self.place = phase, chunk

    def compute(self, *place: object) -> contextlib.AbstractContextManager[None]:
        phase, _, chunk = place
        if (phase, chunk) == self.place:
            raise StepError
        return contextlib.nullcontext()


def _fail_and_go_on(
    strategy: Strategy, phase: Phase, chunk: int, communicator: Communicator | None = None
) -> None:
    layer = moe_layer(communicator=communicator)
    layer.pin(decision(strategy, 4))
    for is_faulty in (False, True, False, True, False):
        layer.recorder = Faulty(phase, chunk) if is_faulty else SpanRecorder()
        failed = False
        try:
            step(layer)
        except StepError:
            failed = True
        assert failed is is_faulty


@pytest.mark.parametrize("chunk", [0, 1, 3])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_of_a_failed_step_is_free_only_behind_its_copies(
    strategy: Strategy, phase: Phase, chunk: int
) -> None:
    def program(_: FakeCuda) -> None:
        _fail_and_go_on(strategy, phase, chunk)

    on_every_rank(program)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_so_it_is_over_a_link_staged_by_the_host(strategy: Strategy, phase: Phase) -> None:
    with FakeCuda():
        _fail_and_go_on(strategy, phase, 1, HostStagedLink(GPU))
