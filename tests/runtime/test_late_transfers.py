"""Transfers that end when they are waited for, not before: no buffer changes under one of them.

On NCCL a later exchange runs behind the earlier ones of its group. Over gloo, or a link that serves
two exchanges at once, nothing but the wait keeps them apart.
"""

import pytest
import torch

from moetune.comm.group import Communicator, Done, OneRank, Transfer
from moetune.domain.constraints import Strategy
from tests.runtime.gpu_runs import STRATEGIES, decision, moe_layer
from tests.runtime.workers import results_of

NAN = float("nan")


class Late(Done):
    """Reads its rows and fills its output when it is first waited for."""

    def __init__(self, output: torch.Tensor, rows: torch.Tensor) -> None:
        output.fill_(NAN)
        self._output, self._rows, self._is_over = output, rows, False

    def wait(self) -> None:
        if not self._is_over:
            self._output.copy_(self._rows)
        self._is_over = True


class LateLink(OneRank):
    """One rank, whose rows are under way until it waits."""

    def all_to_all(
        self, output: torch.Tensor, rows: torch.Tensor, *_: object, **__: object
    ) -> Transfer:
        if rows.is_floating_point():
            return Late(output.detach(), rows.detach())
        return super().all_to_all(output, rows, None, None, "numbers")


def _results(communicator: Communicator, strategy: Strategy, degree: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layer = moe_layer(device=torch.device("cpu"), communicator=communicator)
    layer.pin(decision(strategy, degree))
    return results_of(layer, torch.randn(24, layer.shape.d_model))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_buffer_changes_under_a_transfer(strategy: Strategy) -> None:
    for degree in (1, 3, 5):
        at_once, late = (_results(link, strategy, degree) for link in (OneRank(), LateLink()))
        assert len(at_once) > 5
        for wanted, value in zip(at_once, late, strict=True):
            torch.testing.assert_close(value, wanted, rtol=0, atol=0)
