"""The base of all Mixture-of-Experts layers: parameters, plans, and the order of a forward pass.

First step of a token's way: `forward` agrees with the other ranks, looks the plan up, runs the
gate, and hands the tokens to `function` with the memory policy of the layer's kind.
"""

import os
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

from moetune.comm.agree import agree_on_tokens
from moetune.comm.gloo import communicator_of
from moetune.comm.group import Communicator
from moetune.domain.layer import (
    Activation,
    ExpertParallel,
    LayerKey,
    LayerShape,
    check_divisible,
    check_sequence_parallel,
)
from moetune.domain.plan import SAFE_DECISION, Decision, Plan
from moetune.runtime.moe.decisions import LayerDecisions, dtype_name
from moetune.runtime.moe.executor import PipelineContext
from moetune.runtime.moe.experts import Experts
from moetune.runtime.moe.function import ExpertFunction, MemoryPolicy
from moetune.runtime.moe.gate import Gate, Routing
from moetune.runtime.moe.workspace import MemoryTracker, MemoryUse, Workspace
from moetune.runtime.plans.book import PlanBook
from moetune.runtime.trace import NoRecorder, SpanRecorder

_SEED_LIMIT = 2**62


class ExpertLayer(nn.Module, ABC):
    """A gate and experts that are spread over the ranks of a group.

    All kinds of layers have the same parameters: a checkpoint of one loads into another.

    Attributes:
        expert_parallel: the kind of expert parallelism, as in its plans.
        sequence_parallel: each rank has a shard of the tokens, and the experts see all of them.
    """

    expert_parallel: ClassVar[ExpertParallel]

    aux_loss: torch.Tensor

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        num_experts: int,
        top_k: int = 1,
        *,
        activation: Activation = "gelu",
        bias: bool = True,
        capacity_factor: float | None = None,
        normalize_topk: bool | None = None,
        group: dist.ProcessGroup | None = None,
        pipeline: bool | int = True,
        memory_reuse: bool | str = True,
        plan: Plan | str | os.PathLike[str] | None = None,
        planbook: PlanBook | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        communicator: Communicator | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        check_sequence_parallel(self.expert_parallel, sequence_parallel=sequence_parallel)
        self.sequence_parallel = sequence_parallel
        self.shape = LayerShape(
            d_model=d_model, d_hidden=d_hidden, num_experts=num_experts, top_k=top_k,
            activation=activation,
        )  # fmt: skip
        if communicator is None:
            communicator = communicator_of(group)
        self.communicator = communicator
        check_divisible(num_experts, self.communicator.num_ranks)
        self._tracker, self._host_tracker = MemoryTracker("device"), MemoryTracker("host")
        self.gate = Gate(
            self.shape, normalize_topk=normalize_topk, capacity_factor=capacity_factor,
            tracker=self._tracker, device=device, dtype=dtype,
        )  # fmt: skip
        # Experts behind an all-to-all get gradients from every rank's tokens: a wrapper must not
        # average them. Tensor-parallel experts have data-parallel replicas, as dense layers do.
        owns_experts = self.expert_parallel == "all_to_all"
        self.experts = Experts(
            self.shape, local_experts=num_experts // self.communicator.num_ranks, bias=bias,
            is_replicated=not owns_experts, device=device, dtype=dtype,
        )  # fmt: skip
        self.recorder: SpanRecorder = NoRecorder()
        self.decision = SAFE_DECISION
        self.num_dropped = 0
        key = LayerKey(
            layer=self.shape, num_ranks=self.communicator.num_ranks,
            dtype=dtype_name(self.experts.w1.dtype), expert_parallel=self.expert_parallel,
            sequence_parallel=sequence_parallel,
        )  # fmt: skip
        self._decisions = LayerDecisions(
            key, rank=self.communicator.rank, pipeline=pipeline, memory_reuse=memory_reuse,
            plan=plan, planbook=planbook,
        )  # fmt: skip
        self._workspace = Workspace(self._tracker)
        # DistributedDataParallel around this layer alone reads this; see `prepare_ddp`.
        self._ddp_params_and_buffers_to_ignore = [
            f"experts.{name}" for name, _ in self.experts.named_parameters() if owns_experts
        ]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew: equal gates, and experts that do not depend on the ranks.

        All draw from one seed, which the first rank takes from torch's generator: users seed their
        ranks alike, differently, or not at all.
        """
        if self.gate.weight.is_meta:
            return
        seed = torch.randint(_SEED_LIMIT, (1,), device="cpu").to(self.communicator.device)
        if self.communicator.num_ranks > 1:
            seed = self.communicator.all_gather_values(seed, "the exchange of the experts' seed")[0]
        self.gate.reset(int(seed))
        self.experts.reset(int(seed), self.communicator.rank * self.experts.local_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the experts' weighted outputs.

        Args:
            x: (…, d_model), this rank's tokens; ranks may have different numbers of them.

        Returns:
            The same shape and dtype as `x`.

        Raises:
            InputError: `x` has another width or dtype than the layer (one rank).
            RankMismatchError: the ranks differ; the same on every rank.
            CollectiveError: an exchange failed.
            AllocationError: there is no memory for the step.
        """
        dtype = _compute_dtype(x)
        width = x.shape[-1] if x.dim() else 0
        num_tokens, note = agree_on_tokens(
            self.communicator, num_tokens=x.numel() // width if width else 0,
            signature=self._signature(x, dtype), problem=self._problem(x, dtype), device=x.device,
            note=self._decisions.note(dtype),
        )  # fmt: skip
        self._decisions.heed(note, dtype)
        tokens = self._planned_tokens(num_tokens)
        self.decision = self._decisions.decide(tokens, dtype)
        watch = self._decisions.watch(tokens, dtype, x.device)
        with self._workspace.guard("a forward pass"):
            routing = self.gate(x.reshape(-1, width))
            self.aux_loss = routing.aux_loss
            x_TD = routing.x_TD.to(dtype)
            policy = self._policy(x_TD, routing, num_tokens, self._context(watch.recorder))
            parameters = self.experts.in_dtype(dtype)
            watch.begin()
            with torch.autocast(x.device.type, enabled=False):
                y_TD: torch.Tensor = ExpertFunction.apply(  # type: ignore[no-untyped-call]
                    x_TD, routing.weights_TK, policy, *parameters
                )
            watch.end_forward(y_TD)
        return y_TD.to(x.dtype).view(x.shape)

    def pin(self, decision: Decision | None) -> None:
        """Run with `decision` from now on, on all ranks alike; None goes back to the plan."""
        self._decisions.pin(decision)

    def poison_buffers(self) -> None:
        """Fill every reused buffer with NaN before its use, to find reads of old values; slow."""
        self._workspace = Workspace(self._tracker, poison=True)

    @property
    def memory(self) -> MemoryUse:
        """Memory that the layer holds now, and its peak since `reset_peak_memory`."""
        device, host = self._tracker, self._host_tracker
        return MemoryUse(
            device_bytes=device.num_bytes, peak_device_bytes=device.peak_bytes,
            host_bytes=host.num_bytes, peak_host_bytes=host.peak_bytes,
        )  # fmt: skip

    def reset_peak_memory(self) -> None:
        """Reset the peaks to the memory that the layer holds now."""
        self._tracker.reset_peak()
        self._host_tracker.reset_peak()

    def extra_repr(self) -> str:
        """Show the shape and the ranks."""
        shape = self.shape
        return (
            f"d_model={shape.d_model}, d_hidden={shape.d_hidden}, "
            f"num_experts={shape.num_experts}, top_k={shape.top_k}, "
            f"activation={shape.activation}, ranks={self.communicator.num_ranks}"
        )

    @abstractmethod
    def _policy(
        self,
        x_TD: torch.Tensor,
        routing: Routing,
        num_tokens: tuple[int, ...],
        context: PipelineContext,
    ) -> MemoryPolicy:
        """Return this step's memory policy, after planning the dispatch.

        Args:
            num_tokens: of every rank.
        """

    def _context(self, recorder: SpanRecorder | None) -> PipelineContext:
        """Return the step's context, with the layer's own recorder if the user set one."""
        if recorder is None or not isinstance(self.recorder, NoRecorder):
            recorder = self.recorder
        return PipelineContext(
            communicator=self.communicator, activation=self.shape.activation,
            recorder=recorder, workspace=self._workspace,
        )  # fmt: skip

    def _planned_tokens(self, num_tokens: tuple[int, ...]) -> int:
        """Return the number of tokens to look plans up by, from those of every rank."""
        return max(num_tokens)

    def _signature(self, x: torch.Tensor, dtype: torch.dtype) -> str:
        return (
            f"{self.shape}, {dtype}, {self._decisions.version}, "
            f"gradients {torch.is_grad_enabled()}, of the input {x.requires_grad}"
        )

    def _problem(self, x: torch.Tensor, dtype: torch.dtype) -> str:
        if not x.dim() or x.shape[-1] != self.shape.d_model:
            return f"x has shape {tuple(x.shape)}, its last size must be {self.shape.d_model}"
        weight = self.experts.w1
        if x.device.type != weight.device.type:
            return f"x is on {x.device}, the experts are on {weight.device}"
        if dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            return f"x is {x.dtype}, the experts are {weight.dtype}"
        return ""


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
