"""`MoELayer`: experts between a dispatch and a combine over the ranks of a group.

First step of a token's way: as in `expert_layer`, with the policies of `keep` and `reuse`.
"""

from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import torch

from moetune.domain.layer import ExpertParallel
from moetune.runtime.moe.dispatch import plan_dispatch
from moetune.runtime.moe.executor import PipelineContext
from moetune.runtime.moe.expert_layer import ExpertLayer
from moetune.runtime.moe.function import MemoryPolicy
from moetune.runtime.moe.gate import Routing
from moetune.runtime.moe.keep import KeepActivations
from moetune.runtime.moe.offload import Copies, DeviceCopies, Host, HostPool, Offload
from moetune.runtime.moe.reuse import ReuseBuffers


class MoELayer(ExpertLayer):
    """A Mixture-of-Experts layer that overlaps its all-to-alls with its experts' computation.

    The degree, the number of chunks, changes the time of a step, never its numbers.

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
        mesh: in place of a group: experts are spread over its last dimension, and a first one
            has their replicas.
        pipeline: True takes the degrees from the plan, False is one chunk, a number is that
            degree forward and backward; see also `pin`.
        memory_reuse: True takes the strategy from the plan, False or "none" keeps everything,
            "S1" to "S4" reuse buffers (see `moetune.runtime.moe.reuse`). In one chunk there is
            nothing to reuse, and all are alike.
        plan: a plan, or the path of a plan file.
        planbook: a book that all ranks share, see `moetune.open_planbook`.
        device, dtype: of the parameters.
        communicator: in place of the group's, for example one that models a slower wire.
        sequence_parallel: False; see `TensorExpertLayer`.

    Attributes:
        aux_loss: balance loss of the last forward pass, a scalar.
        decision: what the last forward pass ran with.
        num_dropped: pairs over the capacity in the last forward pass.
        recorder: records when each step of forward and backward ran; see
            `moetune.runtime.trace`.

    Raises:
        InputError: an argument is out of range or the plan is for another layer.
    """

    expert_parallel: ClassVar[ExpertParallel] = "all_to_all"

    def offload_with(self, copies: Copies) -> None:
        """Copy to and from the host with `copies` from now on."""
        self._host = replace(self._host, copies=copies)

    @cached_property
    def _host(self) -> Host:
        return Host(pool=HostPool(self._host_tracker), copies=DeviceCopies())

    def _policy(
        self,
        x_TD: torch.Tensor,
        routing: Routing,
        num_tokens: tuple[int, ...],  # noqa: ARG002 - the dispatch exchanges counts of its own
        context: PipelineContext,
    ) -> MemoryPolicy:
        decision = self.decision
        dispatch = plan_dispatch(
            routing.experts_TK, routing.kept_TK, num_experts=self.shape.num_experts,
            forward_degree=decision.forward_degree, backward_degree=decision.backward_degree,
            communicator=context.communicator,
        )  # fmt: skip
        self.num_dropped = dispatch.num_dropped
        self._tracker.add(*dispatch.tensors)
        if dispatch.is_single_chunk or decision.strategy == "none":
            return KeepActivations(context=context, dispatch=dispatch, order=decision.order)
        offload = Offload(
            decision.strategy, self._host, num_rows=dispatch.num_received, layer=self.shape,
            like=x_TD, is_needed=torch.is_grad_enabled(),
        )  # fmt: skip
        return ReuseBuffers(context=context, dispatch=dispatch, offload=offload)
