"""What no layer can beat at one chunk.

The floor: the two GEMMs of the forward and the four of the backward pass, two all-to-alls in
each, one after the other, of the rows that the rank's experts really have; no gate, no permutation,
no bias, no activation function. The floor's all-to-alls are those of our link, which are faster
than gloo's own; the plain ones are what DeepSpeed uses. `ffn_step` has torch's own modules in
place of the GEMMs: what the experts cost without a layer around them.
"""

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.netlab.cell import Cell, Step
from moetune.comm.gloo import communicator_of

# N rows that this rank sends, M that it receives, R rows of one of its experts, D model, H hidden
ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}


def collectives_step(cell: Cell) -> Step:
    """Return the four all-to-alls of a step, over our link."""
    exchange = _Exchange(cell)

    def step() -> torch.Tensor:
        for _ in range(2):
            exchange.dispatch()
            exchange.combine()
        return exchange.rows_ND

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
    experts = [_Expert(cell, rows) for rows in _Exchange(cell).expert_rows]

    def step() -> torch.Tensor:
        for expert in experts:
            expert.forward()
        for expert in experts:
            expert.backward()
        return experts[0].output_RD

    return step


def sequential_step(cell: Cell) -> Step:
    """Return collectives and products in the order of a layer with one chunk."""
    exchange = _Exchange(cell)
    experts = [_Expert(cell, rows) for rows in exchange.expert_rows]

    def step() -> torch.Tensor:
        exchange.dispatch()
        for expert in experts:
            expert.forward()
        exchange.combine()
        exchange.dispatch()
        for expert in experts:
            expert.backward()
        exchange.combine()
        return exchange.rows_ND

    return step


def ffn_step(cell: Cell) -> Step:
    """Return the same with torch's FFNs, biases and activations included."""
    layer, exchange = cell.layer, _Exchange(cell)
    experts = nn.ModuleList(
        nn.Sequential(
            nn.Linear(layer.d_model, layer.d_hidden),
            ACTIVATIONS[layer.activation](),
            nn.Linear(layer.d_hidden, layer.d_model),
        )
        for _ in exchange.expert_rows
    )
    inputs = [torch.randn(rows, layer.d_model).requires_grad_() for rows in exchange.expert_rows]
    grads = [torch.randn(rows, layer.d_model) for rows in exchange.expert_rows]

    def step() -> torch.Tensor:
        experts.zero_grad(set_to_none=True)
        for rows in inputs:
            rows.grad = None
        exchange.dispatch()
        outputs = [expert(rows) for expert, rows in zip(experts, inputs, strict=True)]
        exchange.combine()
        exchange.dispatch()
        torch.autograd.backward(outputs, grads)
        exchange.combine()
        return exchange.rows_ND

    return step


class _Exchange:
    """All-to-alls over our link of the rows that the cell's tokens choose experts for.

    Attributes:
        rows_ND: what is sent, and where it comes back.
        expert_rows: rows of each of this rank's experts.
    """

    def __init__(self, cell: Cell) -> None:
        self._communicator = communicator_of(None)
        ranks, rank = self._communicator.num_ranks, self._communicator.rank
        counts_PPL = cell.routed_rows().view(ranks, ranks, -1)
        self._sent: list[int] = counts_PPL[rank].sum(-1).tolist()
        self._received: list[int] = counts_PPL[:, rank].sum(-1).tolist()
        self.expert_rows: list[int] = counts_PPL[:, rank].sum(0).tolist()
        self.rows_ND = cell.inputs().repeat_interleave(cell.layer.top_k, dim=0)
        self._arrived_MD = self.rows_ND.new_empty(sum(self._received), cell.layer.d_model)

    def dispatch(self) -> None:
        """Send every row to its expert's rank."""
        self._move(self._arrived_MD, self.rows_ND, self._received, self._sent)

    def combine(self) -> None:
        """Send every row back."""
        self._move(self.rows_ND, self._arrived_MD, self._sent, self._received)

    def _move(
        self, into: torch.Tensor, rows: torch.Tensor, received: list[int], sent: list[int]
    ) -> None:
        self._communicator.all_to_all(into, rows, received, sent, "bare").wait()


class _Expert:
    """The operands of one expert's products, allocated once."""

    def __init__(self, cell: Cell, rows: int) -> None:
        d_model, d_hidden = cell.layer.d_model, cell.layer.d_hidden
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
