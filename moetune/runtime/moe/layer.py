"""The kinds of layers: `MoELayer`, `TensorExpertLayer` (PPMoE), and `RoutedLayer` of other models.

These are the first step of a token's way: see `planned_layer`.
"""

from collections.abc import Sequence
from functools import partial
from operator import index
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moetune.comm.gloo import check_joined, communicator_of, shared_communicator
from moetune.comm.group import Communicator
from moetune.domain.errors import InputError
from moetune.domain.kernels import ExpertKernel
from moetune.domain.layer import Activation, ExpertParallel, LayerKey, LayerShape, check_divisible
from moetune.runtime.moe.decisions import LayerDecisions, dtype_name, forced_strategy
from moetune.runtime.moe.expert_module import Experts, LocalExperts
from moetune.runtime.moe.gate import Gate, Routing
from moetune.runtime.moe.placement import ExpertPlacement
from moetune.runtime.moe.planned_layer import PlannedLayer, sizes_of
from moetune.runtime.plans.book import GivenPlan

_SEED_LIMIT = 2**62
_MESH_DIMS = 2
"""The dimensions of a mesh: replicas and experts."""


class LastLoss:
    """The balance loss of a layer's last forward pass."""

    def __init__(self) -> None:
        self._loss: torch.Tensor | None = None
        self._lacks_gradients = False

    def __reduce__(self) -> tuple[type["LastLoss"], tuple[()]]:
        """Return a fresh object: copies have no loss, because torch copies no graph's tensor."""
        return LastLoss, ()

    def put(self, loss: torch.Tensor, *, trains: bool = False) -> None:
        """Keep a loss; with `trains` it is expected to have gradients."""
        self._loss, self._lacks_gradients = loss, trains and not torch.is_grad_enabled()

    def get(self) -> torch.Tensor | None:
        """Return the loss; None before the first pass.

        Raises:
            InputError: the training pass ran without gradients, and gradients are enabled now.
        """
        if self._lacks_gradients and torch.is_grad_enabled():
            raise InputError(
                "the balance loss of the last training pass has no gradient: the layer ran under "
                "no_grad, as torch's checkpoint with use_reentrant=True does",
                "checkpoint with use_reentrant=False; or read aux_loss inside of the checkpointed "
                "function, or under torch.no_grad() for its value alone",
            )
        return self._loss


class ExpertLayer(PlannedLayer):
    """A gate and experts that are spread over the ranks of a group.

    All kinds of layers have the same parameters: a checkpoint of one kind loads into another.
    """

    experts: Experts

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
        plan: GivenPlan = None,
        placement: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        communicator: Communicator | None = None,
        expert_kernel: ExpertKernel | None = None,
        dispatcher: str | None = None,
    ) -> None:
        if self.expert_parallel == "tensor":
            _check_without_exchange(
                capacity_factor=capacity_factor, placement=placement,
                memory_reuse=None if forced_strategy(memory_reuse) in {None, "none"} else True,
            )  # fmt: skip
        shape = LayerShape(
            d_model=d_model, d_hidden=d_hidden, num_experts=num_experts, top_k=top_k,
            activation=activation,
        )  # fmt: skip
        ranks = _ranks_of(mesh, group, communicator)
        check_divisible(num_experts, ranks.num_ranks)
        gate = Gate(
            shape, normalize_topk=normalize_topk, capacity_factor=capacity_factor,
            device=device, dtype=dtype,
        )  # fmt: skip
        key = LayerKey(
            layer=shape, num_ranks=ranks.num_ranks, expert_parallel=self.expert_parallel,
            dtype=dtype_name(dtype or torch.get_default_dtype()),
        )  # fmt: skip
        decisions = LayerDecisions(
            key, rank=ranks.rank, pipeline=pipeline, memory_reuse=memory_reuse, plan=plan,
            placement=placement, expert_kernel=expert_kernel, dispatcher=dispatcher,
        )  # fmt: skip
        # Experts behind an all-to-all get gradients from all ranks' tokens: a wrapper must not
        # average them. Tensor-parallel experts have data-parallel replicas, as dense layers do.
        experts = Experts(
            shape, ExpertPlacement.of(ranks, num_experts, decisions.placement), bias=bias,
            is_replicated=self.expert_parallel == "tensor", device=device, dtype=dtype,
        )  # fmt: skip
        super().__init__(shape, experts, ranks, decisions=decisions, mesh=mesh)
        self._last_loss = LastLoss()
        self.gate, self.experts = gate, experts
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew: equal gates, and experts that do not depend on the ranks.

        All ranks draw from the first rank's seed, which torch's generator gives: users seed their
        ranks equally, differently or not at all. The ranks then compare their plans, too.

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
        return self.run(x, partial(self._route, x))

    def _route(self, x: torch.Tensor) -> Routing:
        routing: Routing = self.gate(x.reshape(-1, self.shape.d_model))
        if routing.aux_loss is not None:
            trains = self.training and self.gate.weight.requires_grad
            self._last_loss.put(routing.aux_loss, trains=trains)
        return routing

    @property
    def aux_loss(self) -> torch.Tensor:
        """The balance loss of the last forward pass.

        Raises:
            AttributeError: there was no forward pass.
            InputError: the loss has no gradient although gradients are enabled, as after a
                reentrant checkpoint.
        """
        loss = self._last_loss.get()
        if loss is None:
            raise AttributeError("aux_loss")
        return loss

    @aux_loss.setter
    def aux_loss(self, loss: torch.Tensor) -> None:
        self._last_loss.put(loss)


class MoELayer(ExpertLayer):
    """A Mixture-of-Experts layer that overlaps its all-to-alls with its experts' computation.

    The degree, the number of chunks, changes the time of a step, never its numbers.

    Args:
        d_model, d_hidden: width of the tokens and of the experts.
        num_experts: experts of the whole group; every rank holds num_experts / ranks of them.
        top_k: experts of a token.
        activation: "relu", "gelu", "silu" or "swiglu" (gated, no biases).
        bias: whether experts add biases.
        capacity_factor: None drops no token; otherwise an expert takes at most ceil(factor · tokens
            · top_k / num_experts) pairs of each rank. These have the largest weights, as in
            Megatron-Core by default.
        normalize_topk: divide the chosen probabilities by their sum; default top_k > 1.
        group: expert-parallel group; the default is the world. All its ranks construct the layer.
        mesh: given instead of a group: experts are spread over its last dimension, and a first
            dimension has their replicas. Replicas need a mesh.
        pipeline: True takes the degree from the plan, False runs one chunk, a number sets the
            degree; see also `pin`.
        memory_reuse: True takes the strategy from the plan, False or "none" keeps everything, "S1"
            to "S4" reuse buffers (see `moetune.runtime.moe.reuse`). With one chunk all are equal:
            there is nothing to reuse.
        plan: a plan, the path of a plan file, or a book that all ranks share: see
            `moetune.open_planbook`.
        placement: the expert of each place; rank r of P has the r-th of P equal parts. The default
            is the plan's. The gate and checkpoints know experts by their numbers.
        device, dtype: device and dtype of the parameters.
        communicator: replaces the group's; a subclass may model a slower network.
        expert_kernel: "grouped_mm", "liger" or "loop" for the experts' products; None takes the
            plan's, and without a plan torch's `grouped_mm` if the GPU has it.
        dispatcher: "all_to_all"; DeepEP's and other kernels are refused by name.

    Attributes:
        aux_loss: the last forward pass's balance loss, a scalar.
        decision: the decision that the last forward pass ran with.
        num_dropped: pairs that the last forward pass dropped over the capacity.
        recorder: records when each step of forward and backward ran; see
            `moetune.runtime.trace`.

    Raises:
        InputError: an argument is out of range or the plan is for another layer.
        RankMismatchError: the ranks have different plans; on every rank.
    """


class TensorExpertLayer(ExpertLayer):
    """A Mixture-of-Experts layer inside a tensor-parallel group, without dispatch.

    Every rank gives the same tokens, as after a tensor-parallel layer, and gets the same output. A
    rank's experts compute the (token, choice) pairs that chose them, and an all-reduce sums the
    ranks' outputs. Backward, the gradient of x is summed the same way. The gate is replicated, and
    its gradient is complete and equal on all ranks. Parameters have the names and shapes of
    `MoELayer`'s, and the degree changes the time of a step, never its numbers.

    Args:
        d_model, d_hidden, num_experts, top_k, activation, bias: as in `MoELayer`.
        normalize_topk, plan, device, dtype, communicator, expert_kernel: as in
            `MoELayer`.
        capacity_factor, placement: None; no pair is dropped.
        group: tensor-parallel group; the default is the world. All its ranks construct the layer.
        mesh: given instead of a group, as in `MoELayer`.
        pipeline: as in `MoELayer`: a chunk of the output, or of the gradient of x, is summed
            over the ranks while the next is computed.
        memory_reuse: True, False or "none", which do the same here.
        dispatcher: "all_gather".

    Attributes:
        aux_loss: the last forward pass's balance loss, equal on all ranks: add it to the loss on
            every rank, as any loss that all ranks compute equally.
        decision, num_dropped, recorder: as in `MoELayer`.

    Raises:
        InputError: an argument is out of range, or would drop pairs or reuse memory.
    """

    expert_parallel: ClassVar[ExpertParallel] = "tensor"


class RoutedLayer(PlannedLayer):
    """A layer of experts whose router is the caller's.

    The layer has no parameters: its experts are in the caller's module.

    Args:
        shape: shape of the layer; if ranks share an expert's width, plans are for the shards.
        experts: this rank's experts.
        plan: as in `MoELayer`; None runs one chunk.

    Raises:
        InputError: an argument is out of range.
    """

    def __init__(
        self,
        shape: LayerShape,
        experts: LocalExperts,
        communicator: Communicator,
        *,
        mesh: DeviceMesh | None = None,
        plan: GivenPlan = None,
    ) -> None:
        key = LayerKey(
            layer=shape, num_ranks=communicator.num_ranks, dtype=dtype_name(experts.up.dtype),
        )  # fmt: skip
        decisions = LayerDecisions(
            key, rank=communicator.rank, pipeline=plan is not None, memory_reuse=True,
            plan=plan, can_place=False,
        )  # fmt: skip
        super().__init__(shape, experts, communicator, decisions=decisions, mesh=mesh)
        self.experts = experts
        self.training = experts.module.training

    def forward(
        self, x: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Return the experts' weighted outputs.

        Args:
            x: (…, d_model), this rank's tokens; ranks may have different numbers of them.
            experts_TK: chosen experts, numbered among the experts of all ranks.
            weights_TK: weights of the choices; they get gradients.

        Returns:
            The same shape and dtype as `x`.

        Raises:
            InputError, RankMismatchError, CollectiveError, AllocationError: as in `MoELayer`.
        """
        num_tokens = x.numel() // max(1, x.shape[-1])
        wanted, problem = (num_tokens, self.shape.top_k), ""
        if not experts_TK.shape == weights_TK.shape == wanted:
            problem = (
                f"the router gave experts {sizes_of(experts_TK)} and weights "
                f"{sizes_of(weights_TK)}, for {index(num_tokens)} tokens they must be "
                f"{tuple(map(index, wanted))}"
            )
        x_TD = x.reshape(-1, x.shape[-1])
        route = partial(Routing, x_TD=x_TD, weights_TK=weights_TK, experts_TK=experts_TK)
        return self.run(x, route, problem)


def _check_without_exchange(**options: object) -> None:
    """Raise InputError for options that a tensor-parallel group, which drops no pair, lacks."""
    for name, value in options.items():
        if value is not None:
            raise InputError(
                f"{name} is not available in a tensor-parallel group, whose experts drop no pair",
                "omit it, or use moetune.MoELayer",
            )


def _ranks_of(
    mesh: DeviceMesh | None, group: dist.ProcessGroup | None, communicator: Communicator | None
) -> Communicator:
    """Return the communicator over which experts are spread, from what the caller gave."""
    if mesh is not None:
        group = expert_group(mesh, group if communicator is None else communicator)
    if communicator is not None:
        return communicator
    check_joined("the layer")
    return shared_communicator() if group is None else communicator_of(group)


def expert_group(mesh: DeviceMesh, group: object) -> dist.ProcessGroup:
    """Return the group of a mesh over which experts are spread.

    Args:
        group: group or communicator that was given as well as the mesh.

    Raises:
        InputError: the mesh has more than two dimensions (replicas, experts), or two without names,
            or a group was given, too.
    """
    if group is not None:
        raise InputError("give one of mesh, group and communicator")
    if mesh.ndim > _MESH_DIMS:
        raise InputError(
            f"mesh has {mesh.ndim} dimensions, {mesh.mesh_dim_names}; experts need one dimension",
            'take one of them, or two with the replicas first, as in mesh["replicas", "experts"]',
        )
    if mesh.ndim == _MESH_DIMS and not mesh.mesh_dim_names:
        raise InputError("the mesh's dimensions have no names", "give it mesh_dim_names=(…, …)")
    experts: dist.ProcessGroup = mesh.get_group(mesh.ndim - 1)
    return experts
