"""The base of all Mixture-of-Experts layers: parameters, plans, and the order of a forward pass.

First step of a token's way: `forward` lets the layer's kind agree with the other ranks, look the
plan up and run the gate, and hands the tokens to `function` with that kind's memory policy.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh

from moetune.comm.agree import Opening
from moetune.comm.gloo import communicator_of, shared_communicator
from moetune.comm.group import Communicator
from moetune.comm.hierarchical import hierarchical_of
from moetune.comm.launched import check_joined, ranks_per_node
from moetune.domain.errors import InputError
from moetune.domain.layer import (
    Activation,
    ExpertParallel,
    LayerKey,
    LayerShape,
    check_divisible,
    check_sequence_parallel,
)
from moetune.domain.plan import SAFE_DECISION, Decision, Plan
from moetune.domain.quantization import Quantization
from moetune.domain.routing_record import RoutingRecord
from moetune.runtime.moe.decisions import LayerDecisions, dtype_name, forced_strategy
from moetune.runtime.moe.executor import GradientQueue, NoGradients, PipelineContext
from moetune.runtime.moe.expert_module import Experts
from moetune.runtime.moe.function import MemoryPolicy
from moetune.runtime.moe.gate import Gate, Routing
from moetune.runtime.moe.inputs import (
    check_padding,
    expert_group,
    input_dtype,
    input_problem,
    is_capturing,
)
from moetune.runtime.moe.loads import LoadRecorder
from moetune.runtime.moe.placement import ExpertPlacement
from moetune.runtime.moe.quantized import check_keeps, checked_quantization
from moetune.runtime.moe.turns import NUM_BATCHES, current_batch, current_turn
from moetune.runtime.moe.workspace import MemoryTracker, MemoryUse, Workspace
from moetune.runtime.plans.book import PlanBook
from moetune.runtime.plans.timers import NoWatch, Watch
from moetune.runtime.trace import NoRecorder, SpanRecorder

_SEED_LIMIT = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that all ranks agree on, before its tokens leave.

    Args:
        num_tokens: to look plans up by.
        policy: makes the memory policy, given the experts' tokens and the context.
    """

    num_tokens: int
    routing: Routing
    policy: Callable[[torch.Tensor, PipelineContext], MemoryPolicy]


class ExpertLayer(nn.Module, ABC):
    """A gate and experts that are spread over the ranks of a group.

    All kinds of layers have the same parameters: a checkpoint of one loads into another.

    Attributes:
        expert_parallel: the kind of expert parallelism, as in its plans.
        sequence_parallel: each rank has a shard of the tokens, and the experts see all of them.
        quantization: of the experts' products and of the rows on the wire; None for neither.
        gradient_queue: of dense gradients, sent between the exchanges of backward phases.
    """

    expert_parallel: ClassVar[ExpertParallel]

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
        mesh: DeviceMesh | None = None,
        pipeline: bool | int = True,
        memory_reuse: bool | str = True,
        plan: Plan | str | os.PathLike[str] | None = None,
        planbook: PlanBook | None = None,
        placement: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        communicator: Communicator | None = None,
        sequence_parallel: bool = False,
        quantization: Quantization | str | None = None,
        pad_to_capacity: bool = False,
    ) -> None:
        super().__init__()
        self.pad_to_capacity = pad_to_capacity
        if pad_to_capacity:
            check_padding(capacity_factor, quantization)
        check_sequence_parallel(self.expert_parallel, sequence_parallel=sequence_parallel)
        self.sequence_parallel = sequence_parallel
        self.shape = LayerShape(
            d_model=d_model, d_hidden=d_hidden, num_experts=num_experts, top_k=top_k,
            activation=activation,
        )  # fmt: skip
        self.quantization = checked_quantization(
            quantization, self.shape, forced_strategy(memory_reuse)
        )
        if mesh is not None:
            group = expert_group(mesh, group if communicator is None else communicator)
        if communicator is None:
            check_joined("the layer")
            communicator = shared_communicator() if group is None else communicator_of(group)
        self.communicator, self.mesh = communicator, mesh
        self._hierarchical: Communicator | None = None
        check_divisible(num_experts, self.communicator.num_ranks)
        self._tracker, self._host_tracker = MemoryTracker("device"), MemoryTracker("host")
        self.gate = Gate(
            self.shape, normalize_topk=normalize_topk, capacity_factor=capacity_factor,
            tracker=self._tracker, device=device, dtype=dtype,
        )  # fmt: skip
        key = LayerKey(
            layer=self.shape, num_ranks=self.communicator.num_ranks,
            dtype=dtype_name(dtype or torch.get_default_dtype()),
            expert_parallel=self.expert_parallel, sequence_parallel=sequence_parallel,
            quantization=str(self.quantization or ""),
        )  # fmt: skip
        self._decisions = LayerDecisions(
            key, rank=self.communicator.rank, pipeline=pipeline, memory_reuse=memory_reuse,
            plan=plan, planbook=planbook, placement=placement,
        )  # fmt: skip
        # Experts behind an all-to-all get gradients from every rank's tokens: a wrapper must not
        # average them. Tensor-parallel experts have data-parallel replicas, as dense layers do.
        self.experts = Experts(
            self.shape,
            ExpertPlacement.of(self.communicator, num_experts, self._decisions.placement),
            bias=bias, is_replicated=self.expert_parallel == "tensor", device=device, dtype=dtype,
        )  # fmt: skip
        self.recorder: SpanRecorder = NoRecorder()
        self.gradient_queue: GradientQueue = NoGradients()
        self.decision = SAFE_DECISION
        self._num_dropped: int | torch.Tensor = 0
        self._workspaces = [Workspace(self._tracker) for _ in range(NUM_BATCHES)]
        self._aux_losses: dict[int, torch.Tensor] = {}
        self._loads = LoadRecorder(self.experts.local_experts)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew: equal gates, and experts that do not depend on the ranks.

        All draw from one seed, which the first rank takes from torch's generator: users seed their
        ranks alike, differently, or not at all. With the seed the ranks compare their plans.

        Raises:
            InputError: the plan cannot be used.
            RankMismatchError: the ranks have different plans; the same on every rank.
            CollectiveError: the exchange failed.
        """
        if self.gate.weight.is_meta:
            self._decisions.check()
            return
        mine = int(torch.randint(_SEED_LIMIT, (1,), device="cpu"))
        seed = self._decisions.agree(self.communicator, mine)
        self.gate.reset(seed)
        self.experts.reset(seed)

    # Never compiled, because the tokens decide the exchanges' sizes. `torch.compiler.disable` would
    # load the compiler with this module, in every process that only measures.
    @_disable_dynamo
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
        self.experts.check_wrappers()
        dtype = self.experts.compute_dtype or input_dtype(x)
        width = x.shape[-1] if x.dim() else 0
        opening = Opening(
            num_tokens=x.numel() // width if width else 0, signature=self._signature(x, dtype),
            problem=input_problem(
                x, dtype, shape=self.shape, experts=self.experts, quantization=self.quantization
            ),
            note=self._decisions.note(dtype),
        )  # fmt: skip
        with self._tracker.explain("a forward pass"):
            step = self._prepare(x, opening, dtype)
            routing = step.routing
            self.aux_loss = routing.aux_loss
            x_TD = routing.x_TD.to(dtype)
            watch: Watch = NoWatch()
            # Beside another batch a phase takes as long as that one computes.
            if not is_capturing(x) and current_turn() is None:
                watch = self._decisions.watch(step.num_tokens, dtype, x.device)
            policy = step.policy(x_TD, self._context(watch.recorder))
            watch.begin()
            with torch.autocast(x.device.type, enabled=False):
                y_TD: torch.Tensor = self.experts(x_TD, routing.weights_TK, policy)
            watch.end_forward(y_TD)
        # Not a view: an in-place operation on one would drop the hooks that FSDP2 sets on it.
        y: torch.Tensor = torch.ops.aten._unsafe_view(y_TD.to(x.dtype), x.shape)  # noqa: SLF001
        return y

    def pin(self, decision: Decision | None) -> None:
        """Run with `decision` from now on, on all ranks alike; None goes back to the plan.

        Raises:
            InputError: it reuses memory, and the experts are quantized.
        """
        if self.quantization is not None and decision is not None:
            check_keeps(decision.strategy)
        self._decisions.pin(decision)

    def poison_buffers(self) -> None:
        """Fill every reused buffer with NaN before its use, to find reads of old values; slow."""
        self._workspaces = [Workspace(self._tracker, poison=True) for _ in range(NUM_BATCHES)]

    @property
    def aux_loss(self) -> torch.Tensor:
        """Balance loss of the last forward pass, of the batch that asks where two overlap."""
        return self._aux_losses[current_batch()]

    @aux_loss.setter
    def aux_loss(self, loss: torch.Tensor) -> None:
        self._aux_losses[current_batch()] = loss

    @property
    def num_dropped(self) -> int:
        """Pairs over the capacity in the last forward pass."""
        return int(self._num_dropped)

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

    def routing_record(self) -> RoutingRecord:
        """Return how the tokens of training steps were routed; all ranks call this together.

        Counts that the host reads anyway are summed, so that recording costs no exchange.

        Raises:
            InputError: no step was recorded, or rows are padded to a capacity, which the host does
                not count; on all ranks.
            CollectiveError: the exchange failed.
        """
        if self.pad_to_capacity:
            raise InputError(
                "a layer that pads to its capacity has no counts to record",
                "record with pad_to_capacity=False",
            )
        record = self._loads.record(self.communicator, top_k=self.shape.top_k)
        return record.in_order_of(self.experts.placement.order)

    def forget_routing(self) -> None:
        """Begin the record of the routing anew, on all ranks alike."""
        self._loads.clear()

    def _record(self, rows_CL: Sequence[Sequence[int]]) -> None:
        """Add a training step's rows to the record, [piece][local expert]."""
        if self.training and torch.is_grad_enabled():
            self._loads.add(rows_CL)

    def extra_repr(self) -> str:
        """Show the shape and the ranks."""
        shape = self.shape
        return (
            f"d_model={shape.d_model}, d_hidden={shape.d_hidden}, "
            f"num_experts={shape.num_experts}, top_k={shape.top_k}, "
            f"activation={shape.activation}, ranks={self.communicator.num_ranks}"
        )

    @abstractmethod
    def _prepare(self, x: torch.Tensor, opening: Opening, dtype: torch.dtype) -> "Step":
        """Agree with the other ranks, decide, and route the tokens.

        Raises:
            InputError: the input has a problem (one rank).
            RankMismatchError: the ranks differ; the same on every rank.
            CollectiveError: an exchange failed.
        """

    def _decide(self, num_tokens: tuple[int, ...], note: int, dtype: torch.dtype) -> int:
        """Set this step's decision, once the ranks agree; return the tokens that it is for.

        Args:
            num_tokens: of every rank.
            note: the first rank's.
        """
        self._decisions.heed(note, dtype)
        tokens = self._planned_tokens(num_tokens)
        self.decision = self._decisions.decide(tokens, dtype)
        return tokens

    def _context(self, recorder: SpanRecorder | None) -> PipelineContext:
        """Return the step's context, with the layer's own recorder if the user set one."""
        if recorder is None or not isinstance(self.recorder, NoRecorder):
            recorder = self.recorder
        return PipelineContext(
            communicator=self._exchanging, activation=self.shape.activation, recorder=recorder,
            workspace=self._workspaces[current_batch()], gradients=self.experts.gradients,
            quantization=self.quantization, gradient_queue=self.gradient_queue,
            turn=current_turn(),
        )  # fmt: skip

    @property
    def _exchanging(self) -> Communicator:
        """The communicator of the step's dispatcher; the hierarchical one is made at its first."""
        if self.decision.dispatcher == "flat":
            return self.communicator
        if self.pad_to_capacity:
            raise InputError(
                "rows that are padded to a capacity do not travel in two steps",
                'pin or plan the dispatcher "flat", or leave pad_to_capacity out',
            )
        if self._hierarchical is None:
            # All ranks have the same decision, so that they make its groups together.
            self._hierarchical = hierarchical_of(
                self.communicator, ranks_per_node=ranks_per_node(self.communicator.num_ranks)
            )
        return self._hierarchical

    def _planned_tokens(self, num_tokens: tuple[int, ...]) -> int:
        """Return the number of tokens to look plans up by, from those of every rank."""
        return max(num_tokens)

    def _signature(self, x: torch.Tensor, dtype: torch.dtype) -> str:
        return (
            f"{self.shape}, {dtype}, {self.quantization}, {self._decisions.version}, "
            f"gradients {torch.is_grad_enabled()}, of the input {x.requires_grad}"
        )
