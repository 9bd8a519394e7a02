"""`MoELayer`: a gate, and experts between a dispatch and a combine over the ranks of a group.

First step of a token's way: as in `all_to_all`, or with sizes that no routing changes.
"""

import math
from dataclasses import replace
from functools import cached_property, partial

import torch

from moetune.comm.agree import Opening, agree_on_tokens
from moetune.domain.errors import InputError
from moetune.runtime.moe.all_to_all import AllToAllLayer
from moetune.runtime.moe.dispatch import GroupedRows
from moetune.runtime.moe.executor import PipelineContext
from moetune.runtime.moe.expert_layer import ExpertLayer
from moetune.runtime.moe.function import MemoryPolicy
from moetune.runtime.moe.gate import Routing
from moetune.runtime.moe.inputs import is_capturing
from moetune.runtime.moe.padded import padded_dispatch
from moetune.runtime.moe.planned_layer import LayerStep, Route
from moetune.runtime.moe.products import has_grouped


class MoELayer(AllToAllLayer, ExpertLayer):
    """A Mixture-of-Experts layer that overlaps its all-to-alls with its experts' computation.

    The degree, the number of chunks, changes the time of a step, never its numbers.

    Args:
        d_model, d_hidden: width of the tokens and of the experts.
        num_experts: experts of the whole group; every rank holds num_experts / ranks of them.
        top_k: experts of a token.
        activation: "relu", "gelu", "silu" or "swiglu" (gated, no biases).
        bias: whether experts add biases.
        capacity_factor: None drops no token; otherwise an expert takes at most
            ceil(factor · tokens · top_k / num_experts) pairs of each rank, those with the largest
            weights, as Megatron-Core by default.
        pad_to_capacity: an expert always gets so many rows, some of them of no pair. No size then
            depends on the routing, the host never waits, and a CUDA graph can hold the step; all
            ranks give the same number of tokens. Ranks compare their layers and tokens in their
            first call with a number of tokens, which must not be captured. Plans are looked up by
            the rows that are computed: for ceil(factor · tokens) tokens.
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
        placement: expert of each place, of which rank r of P has the r-th of P equal parts;
            default, the plan's. The gate and checkpoints know experts by their own numbers.
        device, dtype: of the parameters.
        communicator: in place of the group's, for example one that models a slower wire.
        sequence_parallel: False; see `TensorExpertLayer`.
        width: the group's ranks as a mesh ("experts", "width"): each expert's d_hidden is cut over
            the last dimension, and experts are spread over the first. A token's rows go to all
            shards of its experts, and plans are of the layer of these: see `LayerShape.in_shards`.
        shared_experts: a module that every token passes beside its experts, whose output is added.
            It runs while the first rows travel, and its backward pass while the last ones do. Its
            parameters are dense ones, equal on all ranks.
        quantization: "fp8_rowwise", "mxfp8" or a `moetune.Quantization`: experts multiply in 8
            bits. All activations are kept, and plans do not know such layers yet.

    Attributes:
        aux_loss: balance loss of the last forward pass, a scalar.
        decision: what the last forward pass ran with.
        num_dropped: pairs over the capacity in the last forward pass; with padding the host waits
            for them, when they are read.
        recorder: records when each step of forward and backward ran; see
            `moetune.runtime.trace`.

    Raises:
        InputError: an argument is out of range or the plan is for another layer.
        RankMismatchError: the ranks have different plans; on every rank.
    """

    def _prepare(
        self, x: torch.Tensor, opening: Opening, dtype: torch.dtype, route: Route
    ) -> LayerStep:
        if self.pad_to_capacity:
            return self._prepare_padded(x, opening, dtype, route)
        return super()._prepare(x, opening, dtype, route)

    def _prepare_padded(
        self, x: torch.Tensor, opening: Opening, dtype: torch.dtype, route: Route
    ) -> LayerStep:
        """Decide and route, without a stop of the host but in the ranks' first such call."""
        agreed: tuple[tuple[int, ...], int] = (opening.num_tokens,) * self.communicator.num_ranks, 0
        # Ranks with other tokens must not go on: their exchanges would have other sizes.
        opening = replace(opening, signature=f"{opening.signature}, {opening.num_tokens} tokens")
        if self.communicator.num_ranks == 1:
            agreed = opening.alone()
        elif opening.problem or opening.signature not in self._agreed:
            if is_capturing(x):
                raise InputError(
                    "a CUDA graph cannot hold the first call with a new number of tokens, dtype or "
                    "plan, in which the ranks compare them",
                    "run one step outside of the capture before",
                )
            agreed = agree_on_tokens(self.communicator, opening, x.device)
            self._agreed.add(opening.signature)
        planned = self._decide(*agreed, dtype)
        routing = route()
        return LayerStep(
            num_tokens=planned, routing=routing, policy=partial(self._policy_padded, routing)
        )

    @cached_property
    def _agreed(self) -> set[str]:
        """Signatures that all ranks had in the same call."""
        return set()

    def _planned_tokens(self, num_tokens: tuple[int, ...]) -> int:
        """Return the most tokens of a rank, with padding those that would be as many rows."""
        most = super()._planned_tokens(num_tokens)
        if not self.pad_to_capacity:
            return most
        assert self.gate.capacity_factor is not None  # noqa: S101 - checked with the arguments
        return math.ceil(self.gate.capacity_factor * most)

    def _policy_padded(
        self, routing: Routing, x_TD: torch.Tensor, context: PipelineContext
    ) -> MemoryPolicy:
        assert routing.places_TK is not None  # noqa: S101 - there is a capacity
        assert routing.capacity is not None  # noqa: S101
        groups = partial(GroupedRows.of, like=x_TD, bias=self.experts.b1 is not None)
        dispatch = padded_dispatch(
            self.places_of(routing.experts_TK), routing.places_TK, capacity=routing.capacity,
            num_experts=self.in_shards.num_experts, num_ranks=self.communicator.num_ranks,
            degrees=self._degrees, groups=groups if has_grouped(x_TD, self.experts.w1) else None,
        )  # fmt: skip
        return self._policy_of(dispatch, x_TD, context)
