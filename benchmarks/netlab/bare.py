"""What no layer can beat at one chunk, and the simplest chunked forward.

The floor: the two GEMMs of the forward and the four of the backward pass, two all-to-alls in
each, one after the other, of the sizes that a balanced layer has; no gate, no permutation, no
activation function. The floor's all-to-alls are those of our link, which are faster than gloo's
own; the plain ones are what DeepSpeed uses.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.netlab.cell import Cell, Step
from moetune.comm.gloo import ReceivesFirst

# N rows of this rank after dispatch, R rows of one of its experts, D model, H hidden, L experts


def collectives_step(cell: Cell) -> Step:
    """Return the four all-to-alls of a step, over our link."""
    exchange, received_ND = _exchange(cell)

    def step() -> torch.Tensor:
        for _ in range(4):
            exchange()
        return received_ND

    return step


def plain_collectives_step(cell: Cell) -> Step:
    """Return the four all-to-alls of a step as gloo has them."""
    rows_ND = cell.inputs().repeat_interleave(cell.layer.top_k, dim=0)
    received_ND = torch.empty_like(rows_ND)

    def step() -> torch.Tensor:
        for _ in range(4):
            dist.all_to_all_single(received_ND, rows_ND, async_op=True).wait()
        return received_ND

    return step


def gemms_step(cell: Cell) -> Step:
    """Return the six products of every local expert."""
    experts = [_Expert(cell) for _ in range(cell.local_experts)]

    def step() -> torch.Tensor:
        for expert in experts:
            expert.forward()
        for expert in experts:
            expert.backward()
        return experts[0].output_RD

    return step


def sequential_step(cell: Cell) -> Step:
    """Return collectives and products in the order of a layer with one chunk."""
    experts = [_Expert(cell) for _ in range(cell.local_experts)]
    exchange, received_ND = _exchange(cell)

    def step() -> torch.Tensor:
        exchange()
        for expert in experts:
            expert.forward()
        exchange()
        exchange()
        for expert in experts:
            expert.backward()
        exchange()
        return received_ND

    return step


def chunked_forward_step(cell: Cell, degree: int) -> Step:
    """Return a forward pass in `degree` chunks of plain asynchronous all-to-alls and products."""
    weights = cell.weights()
    w1_DH, w2_HD = weights["experts.w1"][0], weights["experts.w2"][0]
    chunks = cell.inputs().repeat_interleave(cell.layer.top_k, dim=0).chunk(degree)
    received = [torch.empty_like(chunk) for chunk in chunks]
    returned = [torch.empty_like(chunk) for chunk in chunks]

    def step() -> torch.Tensor:
        arrivals = [
            dist.all_to_all_single(into, chunk, async_op=True)
            for into, chunk in zip(received, chunks, strict=True)
        ]
        departures, kept = [], []
        for arrival, chunk, into in zip(arrivals, received, returned, strict=True):
            arrival.wait()
            kept.append(torch.mm(torch.mm(chunk, w1_DH).relu_(), w2_HD))
            departures.append(dist.all_to_all_single(into, kept[-1], async_op=True))
        for departure in departures:
            departure.wait()
        return returned[0]

    return step


def _exchange(cell: Cell) -> tuple[Callable[[], None], torch.Tensor]:
    """Return one balanced all-to-all over our link, and where it lands."""
    communicator = ReceivesFirst(None)
    rows_ND = cell.inputs().repeat_interleave(cell.layer.top_k, dim=0)
    received_ND = torch.empty_like(rows_ND)
    splits = [len(rows_ND) // communicator.num_ranks] * communicator.num_ranks

    def exchange() -> None:
        communicator.all_to_all(received_ND, rows_ND, splits, splits, "bare", is_alone=True).wait()

    return exchange, received_ND


class _Expert:
    """The operands of one expert's products, allocated once."""

    def __init__(self, cell: Cell) -> None:
        rows, d_model, d_hidden = cell.rows_per_expert, cell.layer.d_model, cell.layer.d_hidden
        self.input_RD = torch.randn(rows, d_model)
        self.hidden_RH = torch.randn(rows, d_hidden)
        self.output_RD = torch.randn(rows, d_model)
        self.w1_DH = torch.randn(d_model, d_hidden)
        self.w2_HD = torch.randn(d_hidden, d_model)
        self.grad_RH = torch.empty(rows, d_hidden)
        self.grad_RD = torch.empty(rows, d_model)
        self.grad_w1_DH = torch.empty(d_model, d_hidden)
        self.grad_w2_HD = torch.empty(d_hidden, d_model)

    def forward(self) -> None:
        torch.mm(self.input_RD, self.w1_DH, out=self.grad_RH)
        torch.mm(self.hidden_RH, self.w2_HD, out=self.output_RD)

    def backward(self) -> None:
        torch.mm(self.output_RD, self.w2_HD.T, out=self.grad_RH)
        torch.mm(self.hidden_RH.T, self.output_RD, out=self.grad_w2_HD)
        torch.mm(self.grad_RH, self.w1_DH.T, out=self.grad_RD)
        torch.mm(self.input_RD.T, self.grad_RH, out=self.grad_w1_DH)
