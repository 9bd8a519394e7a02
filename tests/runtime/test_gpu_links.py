"""Layers and models that reach NCCL: by collectives alone, in the same order on every rank."""

import datetime as dt
from collections.abc import Mapping

import pytest
import torch

from moetune.comm.gloo import communicator_of, new_communicator
from moetune.domain.constraints import Strategy
from moetune.domain.errors import CollectiveError
from moetune.domain.training import FoldedLayout
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.parallel.groups import join
from tests.cuda_kit import FakeCuda, MirrorWorld
from tests.runtime.gpu_runs import (
    BOTH,
    GPU,
    NCCL,
    decision,
    moe_layer,
    on_every_rank,
    step,
    tensor_layer,
)


@pytest.mark.parametrize("backends", [BOTH, NCCL])
@pytest.mark.parametrize("strategy", ["none", "S1", "S4"])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_layer_made_on_the_cpu_exchanges_by_collectives_on_the_gpu(
    degree: int, strategy: Strategy, backends: Mapping[str, str]
) -> None:
    def program(_: FakeCuda) -> None:
        torch.cuda.set_device(GPU)
        layer = moe_layer(device=None).to(GPU)
        layer.pin(decision(strategy, degree))
        step(layer)

    for machine in on_every_rank(program, backends=backends):
        exchanges = [call.label for call in machine.operations if " of group" in call.label]
        kinds = {label.partition(" ")[0] for label in exchanges}
        assert kinds == {"all_to_all", "all_gather", "all_reduce"}


@pytest.mark.parametrize(
    ("backends", "device"), [(BOTH, torch.device("cpu")), (NCCL, GPU), ({"cpu": "gloo"}, "cpu")]
)
def test_values_from_anywhere_travel_on_a_device_that_the_group_has(
    backends: Mapping[str, str], device: torch.device | str
) -> None:
    with FakeCuda() as cuda, MirrorWorld(cuda, backends=backends):
        communicator = communicator_of(None)
        torch.cuda.set_device(GPU)  # also behind the communicator
        assert communicator.device == torch.device(device)
        assert communicator.all_reduce_values(torch.ones(1), "a sum").tolist() == [2.0]


def test_a_moved_layer_has_the_parameters_of_a_layer_that_was_made_there() -> None:
    def parameters(device: torch.device | None) -> list[torch.Tensor]:
        with FakeCuda() as cuda, MirrorWorld(cuda, backends=NCCL):
            torch.cuda.set_device(GPU)
            torch.manual_seed(3)
            layer = MoELayer(8, 16, 4, device=device).to(GPU)
            return [parameter.detach().cpu() for parameter in layer.parameters()]

    for value, expected in zip(parameters(None), parameters(GPU), strict=True):
        assert torch.equal(value, expected)


def test_a_profiler_shows_every_collective_under_its_name() -> None:
    with FakeCuda() as cuda, MirrorWorld(cuda):
        layer = moe_layer()
        layer.pin(decision("S1", 2))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step(layer)
    names = [event.key for event in profile.key_averages() if event.key.startswith("moetune ")]
    phases = [
        f"moetune {phase} {name} {chunk} of 2"
        for phase in ("forward", "backward")
        for name in ("dispatch", "combine")
        for chunk in (1, 2)
    ]
    others = {
        "the agreement on tokens and their counts", "forward combine weights",
        "backward combine weights",
    }  # fmt: skip
    assert set(names) == {*phases, *(f"moetune {name}" for name in others)}


def test_a_failure_to_issue_names_the_exchange_and_where_torch_says_more() -> None:
    with FakeCuda() as cuda, MirrorWorld(cuda, backends={"cpu": "gloo"}):
        on_cpu, on_gpu = torch.ones(3), torch.ones(4, device=GPU)
        with pytest.raises(CollectiveError, match="a sum failed on rank 0 of 2") as failure:
            communicator_of(None).all_reduce(on_gpu, "a sum")
        assert "torchfrtrace" in failure.value.hint
        with pytest.raises(CollectiveError) as failure:
            communicator_of(None).all_gather(on_cpu, torch.ones(1), "values")
        assert "torchfrtrace" not in failure.value.hint


def test_groups_say_what_they_are_for() -> None:
    with FakeCuda() as cuda, MirrorWorld(cuda, num_ranks=8) as world:
        join(FoldedLayout(pp=2, dp=4, ep=2), device_type="cuda")
        # Gradients travel beside the exchanges: none of their groups is one of the first four.
        purposes = ("pp", "dp", "tp", "experts", "replicas of experts", "ranks of a stage")
        assert {pg.desc for pg in world.groups[1:]} == {f"moetune: {name}" for name in purposes}


def test_new_groups_have_streams_of_high_priority_where_gpus_take_part() -> None:
    limit = dt.timedelta(seconds=7)
    for backends, backend, is_first in (
        (BOTH, None, True),
        (NCCL, None, True),
        (BOTH, "gloo", False),
    ):
        with FakeCuda() as cuda, MirrorWorld(cuda, backends=backends) as world:
            new_communicator(purpose="one thing", backend=backend, timeout_seconds=7)
            options = world.groups[-1].options
            assert getattr(options, "is_high_priority_stream", False) == is_first
            assert getattr(options, "_timeout", limit) == limit


def test_layers_without_a_group_share_a_group_of_high_priority() -> None:
    shared = []
    for _ in range(2):  # worlds, one behind the other
        with FakeCuda() as cuda, MirrorWorld(cuda, rank=1) as world:
            layers = [moe_layer(), moe_layer(), tensor_layer()]
            groups = {id(layer.communicator.group) for layer in layers}  # type: ignore[attr-defined]
            assert [pg.desc for pg in world.groups] == [
                "the world", "moetune: experts of the world",
            ]  # fmt: skip
            assert groups == {id(world.groups[1])}
            assert world.groups[1].options.is_high_priority_stream  # type: ignore[attr-defined]
            shared.append(world.groups[1])
    assert shared[0] is not shared[1]
    gloo = {"cpu": "gloo"}
    with FakeCuda() as cuda, MirrorWorld(cuda, backends=gloo) as world:
        MoELayer(8, 16, 4)
        assert len(world.groups) == 1
