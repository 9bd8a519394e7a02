"""Buckets of gradients and shards: when they travel, and what nobody may see meanwhile."""

import pytest
import torch
from torch import nn

from moetune.comm.group import OneRank
from moetune.comm.transfer import Done, Transfer
from moetune.runtime.parallel.buckets import units_of
from moetune.runtime.parallel.parameter_buffer import ParameterBuffer
from moetune.runtime.parallel.reductions import Reductions
from tests.ranks import run_ranks
from tests.runtime import bucket_workers as workers


@pytest.mark.dist
@pytest.mark.parametrize("zero", [0, 1])
def test_parameters_are_whole_when_their_module_is_looked_at(zero: int) -> None:
    assert run_ranks(workers.values_are_whole_or_show, 2, zero) == ["", ""]


@pytest.mark.dist
@pytest.mark.parametrize("zero", [0, 1])
def test_a_rank_that_leaves_a_block_out_has_the_right_sums(zero: int) -> None:
    assert run_ranks(workers.unused_parameters_hold_nothing_up, 2, zero) == ["", ""]


@pytest.mark.dist
@pytest.mark.parametrize("zero", [0, 1])
def test_a_block_that_is_read_elsewhere_trains_alike(zero: int) -> None:
    assert run_ranks(workers.a_block_that_is_read_elsewhere_trains_alike, 2, zero) == ["", ""]


@pytest.mark.dist
def test_a_gradient_behind_its_sum_is_refused() -> None:
    assert run_ranks(workers.a_gradient_behind_its_sum_is_refused, 2) == ["", ""]


@pytest.mark.dist
def test_a_step_behind_a_failed_one_has_its_own_sums() -> None:
    assert run_ranks(workers.a_step_behind_a_failed_one_has_its_own_sums, 2) == ["", ""]


def test_units_are_in_the_order_of_the_forward_pass() -> None:
    net = workers.Net()
    first, second, third = net.blocks
    first.bias.requires_grad = False
    assert [[*map(id, unit)] for unit in units_of(net)] == [
        [*map(id, net.first.parameters())], [id(first.weight)],
        [*map(id, second.parameters())], [*map(id, third.parameters())],
        [*map(id, net.last.parameters())],
    ]  # fmt: skip
    third.weight = second.weight  # the first block that has it waits for it
    assert [len(unit) for unit in units_of(net)] == [2, 1, 2, 1, 2]


class _Bucket(ParameterBuffer):
    """A bucket of one rank that takes itself for one of several, and says when it is reduced."""

    has_replicas = True

    def __init__(self, name: str, parameters: list[nn.Parameter], told: list[str]) -> None:
        super().__init__(parameters, OneRank(), copies=1, is_sharded=False)
        self.name, self.told = name, told

    def reduce(self) -> Transfer:
        self.told.append(f"sum of {self.name}")
        return Done()


def test_gradients_are_summed_beside_the_backward_pass_in_one_order() -> None:
    net, told = workers.Net(), list[str]()
    parts = {"first": net.first, **{f"block {n}": one for n, one in enumerate(net.blocks)}}
    buckets = [_Bucket(name, [*part.parameters()], told) for name, part in parts.items()]
    late = [*net.blocks[1].parameters()]
    reductions = Reductions(net, buckets, num_micro_batches=2, late=late)
    for name, part in parts.items():
        part.get_parameter("weight").register_hook(
            lambda _, name=name: told.append(f"gradient of {name}")
        )
    reductions.begin()
    for _ in range(2):
        net(torch.randn(3, workers.WIDTH)).sum().backward()
    told.append("end")
    reductions.finish()
    last = told[told.index("gradient of first") + 1 :]
    assert last == [
        "gradient of block 2", "sum of block 2", "gradient of block 1", "gradient of block 0",
        "sum of block 0", "gradient of first", "sum of first", "end", "sum of block 1",
    ]  # fmt: skip
