"""The pipelined part with reused memory: rings of buffers in the place of one for each chunk.

What a ring overwrites the backward pass gets back in one of two ways (MPipeMoE §III-D): what
the experts received (T_DI) from host memory (S1, S3) or sent again (S2, S4), and their
pre-activations (T_M) from host memory (S1, S2) or computed again (S3, S4). Neither results nor
weights are kept by the tokens' rank: see `row_weights`.

T tokens, K choices, N rows this rank sends, R rows it receives, D model width, H hidden width.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from moetune.domain.layer import Activation
from moetune.runtime.offload import Offload
from moetune.runtime.pipeline import Pipe
from moetune.runtime.reuse_backward import Backward
from moetune.runtime.reuse_forward import Forward
from moetune.runtime.reuse_step import Step
from moetune.runtime.row_weights import RowWeights


class ReusedExperts(torch.autograd.Function):
    """y = Σₖ weights · expert(x), as `PipelinedExperts`, in rings of two or three buffers."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context has no public type
        x_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        pipe: Pipe,
        activation: Activation,
        offload: Offload,
        w1: torch.Tensor,
        b1: torch.Tensor | None,
        w2: torch.Tensor,
        b2: torch.Tensor | None,
        w3: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return (T, D)."""
        step = Step(
            pipe=pipe, activation=activation, offload=offload, top_k=weights_TK.shape[1],
            parameters=(w1, b1, w2, b2, w3),
        )  # fmt: skip
        try:
            run = Forward(step, x_TD)
            weights_R1 = RowWeights(pipe.dispatch, pipe.link).send(weights_TK, x_TD.dtype)
            pipe.account.add(weights_R1)
            y_TD = run.run(weights_R1)
        except BaseException:
            offload.end()
            raise
        ctx.pipe, ctx.activation, ctx.offload = pipe, activation, offload
        ctx.save_for_backward(
            None if offload.keeps_input else x_TD, weights_TK, weights_R1, w1, b1, w2, b2, w3
        )
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        grad_TD: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, the weights and the parameters."""
        pipe: Pipe = ctx.pipe
        with pipe.scratch.guard("a backward pass"):
            return _backward(ctx, grad_TD)


def _backward(
    ctx: Any,  # noqa: ANN401
    grad_TD: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    x_TD, weights_TK, weights_R1, *parameters = ctx.saved_tensors
    pipe: Pipe = ctx.pipe
    offload: Offload = ctx.offload
    step = Step(
        pipe=pipe, activation=ctx.activation, offload=offload, top_k=weights_TK.shape[1],
        parameters=tuple(parameters),
    )  # fmt: skip
    try:
        run = Backward(step, x_TD, grad_TD, weights_R1)
        grad_x_TD = run.run()
    finally:
        offload.end()
    grad_weights_TK = RowWeights(pipe.dispatch, pipe.link).bring_back(
        run.grad_weights_R1, weights_TK
    )
    return grad_x_TD, grad_weights_TK, None, None, None, *run.experts.totals()
