"""`MoELayer`: the module that executes a plan."""

from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import torch

from moetune.domain.layer import ExpertParallel
from moetune.runtime.copies import Copies, copies_of
from moetune.runtime.dispatch import plan_dispatch
from moetune.runtime.expert_layer import ExpertLayer, device_of
from moetune.runtime.gate import Routing
from moetune.runtime.host_pool import HostPool
from moetune.runtime.offload import Host, Offload
from moetune.runtime.pipeline import Pipe
from moetune.runtime.pipelined_experts import PipelinedExperts
from moetune.runtime.reused_experts import ReusedExperts
from moetune.runtime.stopwatch import Watch


class MoELayer(ExpertLayer):
    """A Mixture-of-Experts layer whose exchanges run behind its experts' computation.

    The degree changes the time of a step, never its numbers.

    Args:
        d_model, d_hidden: width of the tokens and of the experts.
        num_experts: experts of the whole group; every rank holds num_experts / ranks of them.
        top_k: experts of a token.
        activation: "relu", "gelu", "silu" or "swiglu" (gated, no biases).
        bias: whether experts add biases.
        capacity_factor: None drops no token; otherwise an expert takes at most
            ceil(factor · tokens · top_k / num_experts) pairs of each rank.
        normalize_topk: divide the chosen probabilities by their sum; default top_k > 1.
        group: expert-parallel group, default the world. All its ranks construct the layer.
        pipeline: True takes the degrees from the plan, False is one chunk, a number is that
            degree forward and backward; see also `pin`.
        memory_reuse: True takes the strategy from the plan, False or "none" keeps everything,
            "S1" to "S4" use memory again (see `moetune.runtime.reused_experts`). In one chunk
            there is nothing to use again, and all are alike.
        plan: a plan, or the path of a plan file.
        planbook: a book that all ranks share, see `moetune.open_planbook`.
        device, dtype: of the parameters.

    Attributes:
        aux_loss: balance loss of the last forward pass, a scalar.
        decision: what the last forward pass ran with.
        num_dropped: pairs over the capacity in the last forward pass.
        recorder: watches the steps of forward and backward; see `moetune.runtime.recorder`.

    Raises:
        InputError: an argument is out of range or the plan is for another layer.
    """

    expert_parallel: ClassVar[ExpertParallel] = "all_to_all"

    def offload_with(self, copies: Copies) -> None:
        """Copy to and from the host with `copies` from now on."""
        self._host = replace(self._host, copies=copies)

    @cached_property
    def _host(self) -> Host:
        device = device_of(self.experts.w1.device)
        return Host(pool=HostPool(self._host_account), copies=copies_of(device))

    def _run(
        self, x_TD: torch.Tensor, routing: Routing, _: tuple[int, ...], watch: Watch
    ) -> torch.Tensor:
        pipe = Pipe(
            link=self.link,
            dispatch=plan_dispatch(
                routing.experts_TK,
                routing.kept_TK,
                num_experts=self.shape.num_experts,
                forward_degree=self.decision.forward_degree,
                backward_degree=self.decision.backward_degree,
                link=self.link,
            ),
            issue_order=self.decision.order,
            recorder=self.recorder,
            scratch=self._scratch,
        )
        self.num_dropped = pipe.dispatch.num_dropped
        self._account.add(*pipe.dispatch.tensors)
        parameters = self._weights(x_TD.dtype)
        shared = x_TD, routing.weights_TK, pipe, self.shape.activation
        y_TD: torch.Tensor
        watch.begin()
        with torch.autocast(x_TD.device.type, enabled=False):
            if pipe.dispatch.reuses_nothing or self.decision.strategy == "none":
                y_TD = PipelinedExperts.apply(*shared, *parameters)  # type: ignore[no-untyped-call]
            else:
                offload = self._offload(x_TD, pipe.dispatch.num_received)
                y_TD = ReusedExperts.apply(*shared, offload, *parameters)  # type: ignore[no-untyped-call]
        watch.follow(y_TD)
        return y_TD

    def _offload(self, x_TD: torch.Tensor, num_rows: int) -> Offload:
        return Offload(
            self.decision.strategy,
            self._host,
            num_rows=num_rows,
            layer=self.shape,
            like=x_TD,
            is_needed=torch.is_grad_enabled(),
        )
