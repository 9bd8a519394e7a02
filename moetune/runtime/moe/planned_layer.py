"""The base of all layers whose steps follow plans: decisions, memory, and the order of a pass.

This is the first step of a token's way. `run` agrees with the other ranks, looks up the plan, asks
for the routing, and passes the tokens to `function` with the dispatcher's memory policy.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import index
from typing import Any, ClassVar

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh

from moetune.comm.agree import Opening
from moetune.comm.group import Communicator
from moetune.domain.errors import RankMismatchError
from moetune.domain.layer import ExpertParallel, LayerShape, check_divisible
from moetune.domain.plan import SAFE_DECISION, Decision
from moetune.domain.routing_record import RoutingRecord
from moetune.runtime.autograd import sees_selective_checkpoints, unseen_by_selective_checkpoints
from moetune.runtime.moe.decisions import LayerDecisions
from moetune.runtime.moe.dispatch import GroupedRows, RowCounts, TokenPermutation
from moetune.runtime.moe.dispatcher import AllGather, AllToAll
from moetune.runtime.moe.executor import PipelineContext
from moetune.runtime.moe.expert_kernels import grouped_kernel
from moetune.runtime.moe.expert_module import LocalExperts
from moetune.runtime.moe.function import MemoryPolicy, StartedStep
from moetune.runtime.moe.gate import Routing, no_routing
from moetune.runtime.moe.loads import LoadRecorder
from moetune.runtime.moe.operator import handle_of, run_as_operator
from moetune.runtime.moe.placement import is_dtensor
from moetune.runtime.moe.products import GroupedKernel
from moetune.runtime.moe.workspace import Workspace, explain
from moetune.runtime.trace import SpanRecorder

Route = Callable[[], Routing]
"""Returns a step's routing; called once per step."""


class PlannedLayer(nn.Module):
    """Experts that are spread over the ranks of a group, without their gate.

    Args:
        shape: shape of the layer, as plans record it.
        experts: this rank's experts; some kinds of layers register them as a submodule.
        decisions: the layer's decisions.

    Attributes:
        expert_parallel: the kind of expert parallelism, as in the layer's plans.
        dispatcher: brings the tokens to the experts.
    """

    expert_parallel: ClassVar[ExpertParallel] = "all_to_all"
    experts: LocalExperts

    def __init__(
        self,
        shape: LayerShape,
        experts: LocalExperts,
        communicator: Communicator,
        *,
        decisions: LayerDecisions,
        mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        check_divisible(shape.num_experts, communicator.num_ranks)
        self.shape = shape
        self.communicator, self.mesh = communicator, mesh
        self.recorder = SpanRecorder()
        self.decision = SAFE_DECISION
        self.num_dropped = 0
        self._kernels: dict[tuple[object, ...], GroupedKernel | None] = {}
        self._decisions = decisions
        self._workspace = Workspace()
        self._handle = handle_of(self)
        self._loads = LoadRecorder(experts.local_experts)
        kind = AllGather if self.expert_parallel == "tensor" else AllToAll
        self.dispatcher = kind(communicator, experts.placement)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a copied or pickled layer's state, and make a new handle."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._handle = handle_of(self)

    def run(self, x: torch.Tensor, route: Route, problem: str = "") -> torch.Tensor:
        """Return the experts' weighted outputs.

        Compilers and selective-checkpointing policies see a single operator.

        Args:
            x: (…, d_model), this rank's tokens; ranks may have different numbers of them.
            problem: why this rank has no routing; "" if it has a routing.

        Returns:
            The same shape and dtype as `x`.

        Raises:
            InputError: `x` has another width or dtype than the layer (one rank).
            RankMismatchError: the ranks differ; the same on every rank.
            CollectiveError: an exchange failed.
            AllocationError: there is no memory for the step.
        """
        dtype = self.experts.compute_dtype or dtype_of_step(x)
        problem = problem or problem_of(x, dtype, self.shape, self.experts)
        if torch.compiler.is_compiling() or sees_selective_checkpoints():
            return self._run_as_operator(x, dtype, route, problem)
        return self._run(x, dtype, route, problem)

    def _run_as_operator(
        self, x: torch.Tensor, dtype: torch.dtype, route: Route, problem: str
    ) -> torch.Tensor:
        if problem:
            routing = no_routing(x, dtype, self.shape)
        elif torch.compiler.is_compiling():
            routing = route()
        else:
            with unseen_by_selective_checkpoints():
                routing = route()
        step = partial(run_as_operator, self._handle, routing, problem, gradients_of(x))
        with torch.autocast(x.device.type, enabled=False):
            y_TD = self.experts(routing.x_TD.to(dtype), routing.weights_TK, step)
        # With a problem the operator raises on all ranks, unless nothing needs its result.
        return x + y_TD.sum() if problem else shaped_as(x, y_TD)

    # `torch.compiler.disable` would load the compiler with this module, in every process that only
    # measures.
    @_disable_dynamo
    def _run(self, x: torch.Tensor, dtype: torch.dtype, route: Route, problem: str) -> torch.Tensor:
        step = self.start_step(x, dtype, route, problem)
        with torch.autocast(x.device.type, enabled=False):
            y_TD = self.experts(step.x_TD, step.weights_TK, step.run)
        return shaped_as(x, y_TD)

    def start_step(
        self, x: torch.Tensor, dtype: torch.dtype, route: Route, problem: str, gradients: str = ""
    ) -> StartedStep:
        """Agree with the other ranks on a step, route its tokens, and plan it.

        Args:
            dtype: dtype that the step computes in.
            problem: why this rank cannot run the step; "" if it can.
            gradients: `gradients_of` the caller's input; "" if that input is `x`.

        Raises:
            InputError, RankMismatchError, CollectiveError, AllocationError: as in `run`.
        """
        self.experts.check_wrappers()
        problem = problem or self._decisions.kernel_problem(dtype, x.device)
        width = x.shape[-1] if x.dim() else 0
        signature = ""
        if self.communicator.num_ranks > 1:
            signature = self._signature(x, dtype, gradients or gradients_of(x))
        num_tokens = x.numel() // width if width else 0
        opening = Opening(num_tokens=num_tokens, signature=signature, problem=problem)
        with explain("a forward pass"):
            planned, routing, permutation, counts = self._prepare(x, opening, dtype, route)
            x_TD = routing.x_TD.to(dtype)
            watch = self._decisions.watch(planned, dtype, x.device)
            policy = self._policy(permutation, counts, x_TD)
        return StartedStep(x_TD, routing.weights_TK, policy, watch)

    def agree_on_plans(self) -> None:
        """Compare the ranks' layers and plans; all ranks call this.

        Raises:
            InputError: no rank can use its plan.
            RankMismatchError: the ranks have different layers or plans, or some cannot use theirs;
                raised on all.
        """
        self._decisions.agree(self.communicator, 0)

    def pin(self, decision: Decision | None) -> None:
        """Run with `decision` from now on, the same on all ranks; None goes back to the plan.

        Raises:
            InputError: the decision has different degrees forward and backward.
        """
        self._decisions.pin(decision)

    def routing_record(self) -> RoutingRecord:
        """Return how the tokens of training steps were routed; all ranks call this together.

        Counts that the host reads anyway are summed, so that recording costs no exchange.

        Raises:
            InputError: no step was recorded; on all ranks.
            CollectiveError: the exchange failed.
        """
        record = self._loads.record(self.communicator, top_k=self.shape.top_k)
        return record.in_order_of(self.experts.placement.order)

    def forget_routing(self) -> None:
        """Start the record of the routing again, on all ranks equally."""
        self._loads.clear()

    def extra_repr(self) -> str:
        """Show the shape and the ranks."""
        shape = self.shape
        return (
            f"d_model={shape.d_model}, d_hidden={shape.d_hidden}, "
            f"num_experts={shape.num_experts}, top_k={shape.top_k}, "
            f"activation={shape.activation}, ranks={self.communicator.num_ranks}"
        )

    def _prepare(
        self, x: torch.Tensor, opening: Opening, dtype: torch.dtype, route: Route
    ) -> tuple[int, Routing, TokenPermutation, RowCounts]:
        """Agree with the other ranks, decide, route the tokens and count them.

        The host syncs once: counts of rows travel with the opening, by the degree for this rank's
        tokens. They are counted again only if the degree for the largest rank's tokens differs.

        Returns:
            The tokens to look plans up by, the routing, its permutation and its row counts.
        """
        if not self._decisions.has_met:  # a layer that was made on the meta device
            self.agree_on_plans()
        dispatcher, routing, permutation = self.dispatcher, None, None
        degree = self._decisions.expected_degree(opening.num_tokens, dtype)
        if not opening.problem:
            try:
                routing = route()
                permutation = dispatcher.permute(routing, degree)
            except Exception as error:
                self._report(error, opening, x.device)
                raise
        rows, counts = dispatcher.open(opening, permutation, x.device)
        planned = max(opening.agree(rows, self.communicator))
        assert routing is not None  # noqa: S101 - a problem on any rank has raised on all
        self.decision = self._decisions.decide(planned, dtype)
        if permutation is None or counts is None or degree != self.decision.forward_degree:
            permutation = dispatcher.permute(routing, self.decision.forward_degree)
            counts = dispatcher.count(permutation)
        if self.training:
            self._loads.add_pass(counts.rows_CL)
        return planned, routing, permutation, counts

    def _report(self, error: Exception, opening: Opening, device: torch.device) -> None:
        """Send this rank's error to the other ranks, which would else wait until their timeout."""
        if self.communicator.num_ranks > 1:
            failed = replace(opening, problem=f"{type(error).__name__}: {error}")
            rows, _ = self.dispatcher.open(failed, None, device)
            with suppress(RankMismatchError):
                failed.agree(rows, self.communicator)

    def _policy(
        self, permutation: TokenPermutation, counts: RowCounts, x_TD: torch.Tensor
    ) -> MemoryPolicy:
        """Return the memory policy of a step, once the counts of rows are known."""
        grouped, wanted = None, (self.decision.kernel, x_TD.dtype, x_TD.device)
        if wanted not in self._kernels:
            widths = self.shape.d_model, self.shape.d_hidden
            self._kernels[wanted] = grouped_kernel(self.decision.kernel, x_TD, widths)
        if (kernel := self._kernels[wanted]) is not None:
            bias = bool(self.experts.names.up_bias)
            grouped = GroupedRows.of(counts, like=x_TD, bias=bias, kernel=kernel)
        dispatch = permutation.dispatch(counts, grouped=grouped)
        if self.expert_parallel == "all_to_all":  # in a tensor group other ranks have the rest
            self.num_dropped = dispatch.rows_TK.numel() - len(dispatch.pairs_N)
        context = PipelineContext(
            communicator=self.communicator, activation=self.shape.activation,
            recorder=self.recorder, workspace=self._workspace, gradients=self.experts.gradients,
            form=self.experts.form,
        )  # fmt: skip
        return self.dispatcher.policy(dispatch, context, self.decision)

    def _signature(self, x: torch.Tensor, dtype: torch.dtype, gradients: str) -> str:
        return (
            f"{self.shape}, {dtype}, "
            f"{self._decisions.version}, {gradients}{self.dispatcher.signature(x)}"
        )


# Compilers trace the following functions.


def gradients_of(x: torch.Tensor) -> str:
    """Return a text of which gradients a step needs; it must be equal on all ranks."""
    return f"gradients {torch.is_grad_enabled()}, of the input {x.requires_grad}"


def shaped_as(x: torch.Tensor, y_TD: torch.Tensor) -> torch.Tensor:
    """Return a step's outputs in the shape and dtype of the input `x`."""
    # Not a view: an in-place operation on one would drop the hooks that FSDP2 sets on it.
    y: torch.Tensor = torch.ops.aten._unsafe_view(y_TD.to(x.dtype), x.shape)  # noqa: SLF001
    return y


def sizes_of(values: torch.Tensor) -> tuple[int, ...]:
    """Return the shape for a message, as constants of a compiled graph."""
    return tuple(map(index, values.shape))


def problem_of(
    x: torch.Tensor, dtype: torch.dtype, shape: LayerShape, experts: LocalExperts
) -> str:
    """Return why the experts cannot take a step's tokens; "" if they can.

    Args:
        dtype: dtype that the step computes in.
    """
    if not x.dim() or x.shape[-1] != shape.d_model:
        return f"x has shape {sizes_of(x)}, its last size must be {shape.d_model}"
    weight = experts.up
    # FSDP2 moves what it gathers from the host.
    if x.device.type != weight.device.type and not is_dtensor(weight):
        return f"x is on {x.device}, the experts are on {weight.device}"
    is_cast = experts.compute_dtype or torch.is_autocast_enabled(x.device.type)
    if dtype != weight.dtype and not is_cast:
        return f"x is {x.dtype}, the experts are {weight.dtype}"
    return ""


def dtype_of_step(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of a step: autocast's if it is enabled, else that of the tokens."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
