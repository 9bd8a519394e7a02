"""Layers on fake GPUs whose rows travel in two steps: orders, stops of the host, and memory."""

from dataclasses import replace

import pytest
import torch

from moetune.comm.steps import Exchange, OnStreams
from moetune.comm.transfer import GroupRank, Transfer
from moetune.domain.constraints import Dispatcher, Strategy
from moetune.domain.layer import Workload
from moetune.solve.layer.peak import Peak, peak_bytes
from tests.cuda_kit import FakeCuda, MirrorWorld
from tests.runtime.gpu_runs import GPU, decision, moe_layer, on_every_rank, step

RANKS, TOKENS = 4, 24


@pytest.fixture(autouse=True)
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")


def test_ranks_issue_alike_and_the_host_stops_no_more_often() -> None:
    """Also where a pin changes the exchange: counts have then been exchanged the other way."""
    turns: tuple[Dispatcher, ...] = ("flat", "flat", "hierarchical", "hierarchical", "flat")
    stops: list[list[int]] = []

    def program(cuda: FakeCuda) -> None:
        torch.cuda.set_device(GPU)
        layer = moe_layer()
        stops.append([])
        for dispatcher in turns:
            layer.pin(replace(decision("S4", (2, 2)), dispatcher=dispatcher))
            cuda.syncs.clear()
            step(layer)
            stops[-1].append(len(cuda.syncs))

    on_every_rank(program, num_ranks=RANKS)
    assert [[found[1], found[3]] for found in stops] == [[1, 1]] * RANKS


class Held:
    """A transfer that counts among those not waited for."""

    def __init__(self, transfer: Transfer, count: "Count") -> None:
        self._transfer, self._count, self._is_held = transfer, count, True

    def wait(self) -> None:
        self._transfer.wait()
        self._count.now -= self._is_held
        self._is_held = False

    def future(self) -> torch.futures.Future[object] | None:
        return self._transfer.future()


class Count:
    def __init__(self) -> None:
        self.now = 0
        self.most = {"forward": 0, "backward": 0}

    def held(self, transfer: Transfer, name: str) -> Transfer:
        phase = name.partition(" ")[0]
        if phase not in self.most:
            return transfer
        self.now += 1
        self.most[phase] = max(self.most[phase], self.now)
        return Held(transfer, self)


@pytest.mark.parametrize("degrees", [(1, 1), (2, 2), (4, 3)])
@pytest.mark.parametrize("strategy", ["none", "S1", "S2"])
def test_plans_count_the_rows_between_two_steps(
    monkeypatch: pytest.MonkeyPatch, strategy: Strategy, degrees: tuple[int, int]
) -> None:
    count, original = Count(), OnStreams.start

    def start(streams: OnStreams, exchange: Exchange, name: str, group_rank: GroupRank) -> Transfer:
        return count.held(original(streams, exchange, name, group_rank), name)

    monkeypatch.setattr(OnStreams, "start", start)
    with FakeCuda() as cuda, MirrorWorld(cuda, num_ranks=RANKS):
        torch.cuda.set_device(GPU)
        layer = moe_layer()
        layer.pin(replace(decision(strategy, degrees), dispatcher="hierarchical"))
        step(layer, num_tokens=TOKENS)
    assert count.now == 0

    def peak(dispatcher: Dispatcher) -> Peak:
        return peak_bytes(
            workload=Workload(layer=layer.shape, world_size=RANKS, tokens_per_rank=TOKENS),
            forward_degree=degrees[0], backward_degree=degrees[1], strategy=strategy,
            dispatcher=dispatcher,
        )  # fmt: skip

    row_bytes = layer.shape.top_k * layer.shape.d_model * 4
    held = [
        3 * count.most[phase] * (TOKENS // degree) * row_bytes
        for phase, degree in zip(count.most, degrees, strict=True)
    ]
    more = peak("hierarchical").device_bytes - peak("flat").device_bytes
    assert min(held) <= more <= max(held)
