"""Dense gradients in pieces: when each is sent in the backward pass, on all ranks in one order.

Every rank sends the same pieces in the same order, through a communicator of their own: each one
once the backward pass has come to its place in the schedule and has made its gradients, and behind
the exchanges that were issued before. Both follow the graph. A parameter that a rank does not use
holds back that rank's pieces until the end of its backward pass; no rank ever leaves one out.
"""

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from moetune.comm.group import Communicator
from moetune.comm.transfer import Transfer
from moetune.domain.document import digest
from moetune.domain.errors import InputError
from moetune.domain.gradients import GradientSchedule, PieceQueue, default_schedule
from moetune.runtime.autograd import is_in_backward
from moetune.runtime.moe.planned_layer import PlannedLayer
from moetune.runtime.moe.turns import current_batch
from moetune.runtime.parallel.flat import FlatGradients
from moetune.runtime.parallel.senders import sender_of
from moetune.runtime.trace import NoRecorder, SpanRecorder

_OTHER_ORDERS = (
    "ranks made their dense gradients in different orders in the first backward pass, perhaps "
    "because they use other parameters: all are reduced at the end of every backward pass"
)
GRADIENT_MARK, PHASE_MARK = "gradient", "phase"
"""Names of recorded moments: a gradient is made; a phase's last combine has ended."""


class DenseGradients:
    """The gradients of dense parameters: the `GradientQueue` of the model's MoE layers.

    The first backward pass sends all at its end and records the order in which gradients are made.
    If the ranks have recorded the same, the buffers have that order from then on.

    Args:
        dense: parameters with replicas on all ranks, by name.
        schedule: None for pieces behind each MoE layer's backward phase.

    Attributes:
        is_synced: whether backward passes reduce.
        recorder: marks the time of each gradient and of each phase's end.
    """

    def __init__(
        self,
        model: nn.Module,
        dense: Mapping[str, nn.Parameter],
        communicator: Communicator,
        schedule: GradientSchedule | None,
    ) -> None:
        self.is_synced = True
        self.recorder: SpanRecorder = NoRecorder()
        self._num_batches = 1
        self._dense, self._schedule, self._communicator = dense, schedule, communicator
        self._names = [name for name, each in dense.items() if each.requires_grad][::-1]
        self._is_active, self._recorded, self._has_order = False, dict[int, int](), False
        if not self.is_reduced:
            return
        self._lay_out(range(len(self._names)), GradientSchedule())
        self._sender = sender_of(communicator, self.device)
        for number, name in enumerate(self._names):
            dense[name].register_post_accumulate_grad_hook(partial(self._made, number))
        for module in model.modules():
            if isinstance(module, PlannedLayer):
                module.gradient_queue = self
        model.register_forward_pre_hook(self._abandon)

    def before_experts(self, chunk: int, behind: Transfer | None) -> None:
        """Send what is due before a chunk's experts."""
        self._reach(chunk, behind)

    def behind_phase(self) -> None:
        """Send what is due behind a phase's last combine."""
        self._reach(None, None)
        with self.recorder.compute("backward", PHASE_MARK, 0):
            pass

    @contextlib.contextmanager
    def of_batches(self, num_batches: int) -> Iterator[None]:
        """Take a gradient as made once all batches have added to it, and reduce at the end.

        The places of pieces are those of the last batch, which is behind the others.

        Raises:
            InputError: the timeline of one batch is being recorded.
        """
        self.refuse_recording()
        self._abandon()  # a backward pass that failed
        self._num_batches = num_batches
        try:
            yield
            if self._is_active:
                self._finish()
        finally:
            self._num_batches = 1

    def refuse_recording(self) -> None:
        """Raise InputError where the timeline of one batch is being recorded, before two run."""
        if not isinstance(self.recorder, NoRecorder):
            raise InputError(
                "gradients are planned by the timeline of one batch, and there are two",
                "give moetune.plan_gradients a step of one batch",
            )

    def _reach(self, chunk: int | None, behind: Transfer | None) -> None:
        if not self.is_synced or current_batch() != self._num_batches - 1:
            return
        self._begin()
        self._queue.reach(chunk)
        self._send_due(behind)

    def _begin(self) -> None:
        """Prepare for a backward pass at its first gradient or phase, and for its end."""
        if self._is_active:
            return
        self._is_active, self._num_made = True, 0
        self._queue.restart()
        self._is_made = [False] * len(self._names)
        self._num_added = [0] * len(self._names)
        if not self._has_order:  # an earlier one has failed
            self._recorded = {}
        if self._num_batches == 1:
            Variable._execution_engine.queue_callback(self._finish)  # noqa: SLF001 - as DDP and FSDP2 do

    def _made(self, number: int, parameter: torch.Tensor) -> None:
        """Take note of a parameter's gradient."""
        if not self.is_synced:
            return
        self._begin()
        self._num_added[number] += 1
        if self._num_added[number] < self._num_batches:
            return
        with self.recorder.compute("backward", GRADIENT_MARK, number):
            pass
        place = self._places[number]
        if self._is_made[place] and self._begins[place] < self._queue.sent_bytes:
            raise InputError(
                f"{self._names[number]} got two gradients in one backward pass, the second after "
                "the first was sent",
                "use torch.utils.checkpoint with use_reentrant=False",
            )
        self._take(number, parameter)
        self._is_made[place] = True
        if not self._has_order:  # later backward passes may use other parameters on some ranks
            self._recorded.setdefault(number, int(self._queue.position[0]))
        while self._num_made < len(self._is_made) and self._is_made[self._num_made]:
            self._num_made += 1
        self._send_due(None)

    def _take(self, number: int, parameter: torch.Tensor) -> None:
        """Move a gradient into its buffer."""
        view, grad = self._flat.views[self._places[number]], parameter.grad
        if grad is not None and grad.is_sparse:
            raise InputError(
                f"{self._names[number]} has a sparse gradient", "make its layer with sparse=False"
            )
        if grad is None:
            view.zero_()
        elif grad is not view:
            view.copy_(grad.detach())
        parameter.grad = view if parameter.requires_grad else None

    def _send_due(self, behind: Transfer | None) -> None:
        made_bytes = self._flat.ends[self._num_made - 1] if self._num_made else 0
        for number in self._queue.due(made_bytes):
            self._sender.start(self._parts[number], behind)

    def _finish(self) -> None:
        """Send the rest, and wait for all; at the end of a backward pass."""
        self._is_active = False
        for number, name in enumerate(self._names):
            if not self._is_made[self._places[number]]:
                self._take(number, self._dense[name])
        for number in self._queue.due(math.inf):
            self._sender.start(self._parts[number], None)
        self._sender.finish()
        self._check_frozen()
        if not self._has_order:
            self._order()

    def _check_frozen(self) -> None:
        known = set(self._names)
        for name, parameter in self._dense.items():
            if parameter.requires_grad and name not in known:
                raise InputError(
                    f"{name} was frozen when the model was replicated: its gradients are not "
                    "averaged",
                    "set requires_grad before moetune.replicate",
                )

    def _order(self) -> None:
        """Lay the buffers out in the order of the first backward pass, if all ranks have it."""
        self._has_order = True
        made = tuple(self._recorded.items())
        told = self._communicator.all_gather_object(digest(made), "the order of gradients")
        if len(set(told)) > 1:
            self._recorded = {}
            if self._communicator.rank == 0:
                warnings.warn(_OTHER_ORDERS, stacklevel=2)
            return
        self.follow(
            self._schedule
            or default_schedule([(self.num_bytes(number), phase) for number, phase in made])
        )

    @property
    def is_reduced(self) -> bool:
        """Whether there is anything to reduce."""
        return self._communicator.num_ranks > 1 and bool(self._names)

    @property
    def communicator(self) -> Communicator:
        """The ranks with replicas."""
        return self._communicator

    @property
    def device(self) -> torch.device:
        """That of the gradients."""
        return self._dense[self._names[0]].device

    @property
    def made(self) -> tuple[int, ...]:
        """Numbers of the parameters in the order in which all ranks make their gradients."""
        return tuple(self._recorded)

    def num_bytes(self, number: int) -> int:
        """Return the bytes of a parameter's gradient."""
        return self._dense[self._names[number]].nbytes

    def follow(self, schedule: GradientSchedule) -> None:
        """Send pieces by that schedule, the same on all ranks, from the next backward pass on."""
        others = (each for each in range(len(self._names)) if each not in self._recorded)
        grads = [self._dense[name].grad for name in self._names]
        self._lay_out([*self._recorded, *others], schedule)
        for number, grad in enumerate(grads):
            if grad is not None:
                parameter = self._dense[self._names[number]]
                parameter.grad = grad
                self._take(number, parameter)

    def _lay_out(self, order: Sequence[int], schedule: GradientSchedule) -> None:
        """Make buffers for the numbered parameters in that order, and cut them into pieces."""
        self._places = [0] * len(order)
        for place, number in enumerate(order):
            self._places[number] = place
        self._flat = FlatGradients([self._dense[self._names[number]] for number in order])
        self._begins = (0, *self._flat.ends[:-1])
        self._queue = PieceQueue(schedule, self._flat.num_bytes)
        self._parts = self._flat.cut([piece.end_bytes for piece in self._queue.pieces])

    def _abandon(self, *_: Any) -> None:  # noqa: ANN401 - a hook's arguments
        """Forget a backward pass that has failed, before the next step's forward pass."""
        if self._is_active and not is_in_backward() and self._num_batches == 1:
            self._is_active = False
            self._sender.finish()
