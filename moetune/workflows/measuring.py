"""Measuring sessions on ranks, and the layers whose times they take.

`workflows.launch` starts the ranks; this module, which loads torch, is imported only there.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from moetune.comm.group import Communicator, OneRank
from moetune.config import Launch
from moetune.domain.errors import CollectiveError
from moetune.domain.plan import SAFE_DECISION
from moetune.domain.samples import (
    HOST_CHUNKS,
    HOST_WIDTH,
    LAUNCHES,
    RowsPoint,
    StepPoint,
)
from moetune.measure.device import Device, drop, open_device
from moetune.measure.operations import Makers
from moetune.measure.ranks import MeasuringRanks
from moetune.measure.session import Assignment, News, run_session
from moetune.runtime.moe.layer import MoELayer
from moetune.workflows.launch import rank_device, run_on_ranks
from moetune.workflows.steps import random_steps

_NUM_EXPERTS = 2


def measure_on_ranks(
    assignment: Assignment,
    *,
    num_ranks: int,
    launch: Launch | None,
    environ: Mapping[str, str],
    on_news: Callable[[News], object],
    oversubscribe: bool = False,
) -> None:
    """Run the session on `num_ranks` ranks of this machine, or as one rank of a launch.

    Raises:
        InputError: fewer CUDA devices or cores than ranks, or an assignment that the session
            refuses.
        CollectiveError: a rank died, or the ranks of the launch cannot reach each other.
    """
    try:
        run_on_ranks(
            _measure,
            assignment,
            num_ranks=num_ranks,
            launch=launch,
            environ=environ,
            on_message=on_news,
            oversubscribe=oversubscribe,
        )
    except CollectiveError as error:
        raise CollectiveError(
            str(error),
            "run again with --resume: it omits the points that are already in the database",
        ) from error


def _measure(assignment: Assignment, tell: Callable[[News], object]) -> None:
    device = open_device(rank_device().index or 0)
    run_session(
        assignment, device=device, ranks=MeasuringRanks(), on_news=tell, makers=block_makers()
    )


def block_makers() -> Makers:
    """Return functions that make a layer's forward pass or step."""
    rows: dict[str, Callable[[RowsPoint, Device], Callable[[], None]]] = dict(
        zip(LAUNCHES, (_chunked_layer, _chunked_layer_step), strict=True)
    )
    return Makers(rows=rows, step=_layer_step)


def _layer_step(point: StepPoint, device: Device, communicator: Communicator) -> Callable[[], None]:
    steps = random_steps(point.workload, device=device.torch_device, communicator=communicator)
    steps.layer.pin(
        replace(SAFE_DECISION, forward_degree=point.degree, backward_degree=point.degree)
    )
    return steps.once


def _chunked_layer(point: RowsPoint, device: Device) -> Callable[[], None]:
    layer, x_TD = _in_chunks(point, device)
    return lambda: drop(layer(x_TD))


def _chunked_layer_step(point: RowsPoint, device: Device) -> Callable[[], None]:
    layer, x_TD = _in_chunks(point, device)
    grad_TD = torch.ones_like(x_TD)
    return lambda: drop(layer(x_TD).backward(grad_TD))


def _in_chunks(point: RowsPoint, device: Device) -> tuple[MoELayer, torch.Tensor]:
    """Return a layer in the point's number of chunks, and as small a batch as has all of them."""
    dtype = getattr(torch, point.dtype)
    layer = MoELayer(
        HOST_WIDTH, HOST_WIDTH, _NUM_EXPERTS, pipeline=point.rows, communicator=OneRank(),
        device=device.torch_device, dtype=dtype,
    )  # fmt: skip
    size = HOST_CHUNKS[-1], HOST_WIDTH
    return layer, torch.ones(size, dtype=dtype, device=device.torch_device, requires_grad=True)
