"""`moetune.plan_gradients`: record steps of a replicated model and plan its gradients' pieces.

The timeline of the backward pass is the model's own: exchanges, experts, and the dense computation
between them, whatever modules there are. Times are means over the ranks, medians over the steps.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from moetune.comm.agree import decide_on_first
from moetune.comm.group import Communicator
from moetune.comm.transfer import Transfer
from moetune.domain.constraints import Order
from moetune.domain.costs import LinearCost
from moetune.domain.errors import InputError
from moetune.domain.gradients import GradientSchedule
from moetune.runtime.moe.planned_layer import PlannedLayer
from moetune.runtime.parallel.dense_gradients import GRADIENT_MARK, PHASE_MARK, DenseGradients
from moetune.runtime.parallel.replicate import dense_gradients_of
from moetune.runtime.trace import NoRecorder, RecordedSpan, recorder_of
from moetune.solve.model.gradients import BackwardPass, PlannedGradients, best_pieces
from moetune.solve.model.program import Compute, Event, Program, Send, phase_program

_WARM_UP_STEPS = 2
_STEPS = 3
_REDUCED_BYTES = (2**18, 2**22)
_REDUCTIONS = 3
_COMPUTED = 256
"""Width of the products that a CPU computes meanwhile: a fraction of a millisecond each."""
_PART_BYTES = 2**20
"""Gradients that are made in one part of the dense computation, at least."""


def plan_gradients(model: nn.Module, step: Callable[[], object]) -> PlannedGradients:
    """Plan the pieces of dense gradients for a step of training, and follow the plan from now on.

    All ranks call this together; it runs five steps.

    Args:
        model: of `moetune.replicate`.
        step: runs one forward and one backward pass with as many tokens as later steps.

    Returns:
        The schedule, and the predicted time of the backward pass with it and without.

    Raises:
        InputError: the model is not replicated, a step has not one backward pass, or the ranks make
            gradients in different orders.
    """
    gradients = dense_gradients_of(model)
    if not gradients.is_reduced:
        return best_pieces(BackwardPass(program=(), reduce_seconds=lambda _: 0.0))
    for _ in range(_WARM_UP_STEPS):
        step()
    if not gradients.made:
        raise InputError(
            "ranks made dense gradients in different orders, or the step has no backward pass",
            "plan a step that uses the same parameters on all ranks",
        )
    gradients.follow(GradientSchedule())
    rounds = [_recorded(model, gradients, step) for _ in range(_STEPS)]
    program = _mean(rounds, gradients.communicator)
    cost = _reduction(gradients)
    backward = BackwardPass(program=program, reduce_seconds=cost.seconds)
    found = decide_on_first(
        gradients.communicator, lambda: best_pieces(backward), "the schedule of gradients"
    )
    gradients.follow(found.schedule)
    return found


def _recorded(model: nn.Module, gradients: DenseGradients, step: Callable[[], object]) -> Program:
    """Run a step and return the program of its backward pass."""
    layers = [each for each in model.modules() if isinstance(each, PlannedLayer)]
    recorders = [layer.recorder for layer in layers]
    recorder = recorder_of(gradients.device)
    try:
        gradients.recorder = recorder
        for layer in layers:
            layer.recorder = recorder
        step()
        spans = recorder.spans()
    finally:
        gradients.recorder = NoRecorder()
        for layer, before in zip(layers, recorders, strict=True):
            layer.recorder = before
    backward = [span for span in spans if span.phase == "backward"]
    stages = _stages(backward, gradients.num_bytes)
    return tuple(event for number, one in enumerate(stages) for event in one.program(number))


class _Stage:
    """Steps of a phase and of the dense computation behind it, as they are read from a trace."""

    def __init__(self) -> None:
        self._seconds: dict[str, dict[int, float]] = {"dispatch": {}, "experts": {}, "combine": {}}
        self._parts: list[Compute] = []
        self._order: Order = "dispatch_first"
        self.is_over = False
        self._now: float | None = None

    def add(self, span: RecordedSpan) -> None:
        """Add a step of the phase; a combine may be recorded behind its end."""
        name = span.name if span.name in self._seconds else "dispatch"  # a policy's own transfers
        if name == "dispatch" and self._seconds["combine"]:
            self._order = "interleaved"
        chunks = self._seconds[name]
        seconds = span.end_seconds - span.start_seconds
        chunks[span.chunk] = chunks.get(span.chunk, 0.0) + seconds
        if not self.is_over:
            self._now = span.end_seconds

    def end_phase(self, now: float) -> None:
        """End the phase: what follows is dense computation.

        Where shared experts have made gradients beside the last combine, the rest of that was a
        wait, which is the phase's own.
        """
        self.is_over = True
        self._now = now if self._now is None or self._parts else min(now, self._now)

    def pass_time(self, now: float, num_bytes: int = 0) -> None:
        """Add dense computation until now, which has made gradients of so many bytes."""
        seconds = 0.0 if self._now is None else max(0.0, now - self._now)
        self._now = now if self._now is None else max(now, self._now)
        if self._parts and self._parts[-1].made_bytes < _PART_BYTES:
            last = self._parts.pop()
            seconds, num_bytes = seconds + last.seconds, num_bytes + last.made_bytes
        self._parts.append(Compute(seconds, num_bytes))

    def program(self, number: int) -> Iterator[Event]:
        """Yield what the phase and the dense computation issue, the phase as the numbered one."""
        steps = {
            name: tuple(chunks.get(chunk, 0.0) for chunk in sorted(self._seconds["experts"]))
            for name, chunks in self._seconds.items()
        }
        if steps["experts"]:
            yield from phase_program(
                f"phase {number}", dispatch_seconds=steps["dispatch"],
                compute_seconds=steps["experts"], combine_seconds=steps["combine"],
                order=self._order, is_backward=True,
            )  # fmt: skip
        yield from self._parts


def _stages(spans: Sequence[RecordedSpan], num_bytes: Callable[[int], int]) -> Iterator[_Stage]:
    """Yield the stages, the dense computation before the first phase first.

    Args:
        spans: of the backward pass, in the order of their starts.
        num_bytes: of a numbered parameter's gradient.
    """
    stage = _Stage()
    stage.end_phase(spans[0].start_seconds if spans else 0.0)
    for span in spans:
        now = span.start_seconds
        if span.name == PHASE_MARK:
            stage.end_phase(now)
        elif span.name == GRADIENT_MARK:
            stage.pass_time(now, num_bytes(span.chunk))
        else:
            # The thread that records a combine's end may wait for the interpreter: no phase begins
            # with one.
            if stage.is_over and span.name != "combine":
                stage.pass_time(now)
                yield stage
                stage = _Stage()
            stage.add(span)
    yield stage


def _mean(rounds: Sequence[Program], communicator: Communicator) -> Program:
    """Return medians over the rounds of means over the ranks."""
    shapes = {str(_with_seconds(program, iter(()))) for program in rounds}
    if len(set(communicator.all_gather_object(str(sorted(shapes)), "the recorded steps"))) > 1 or (
        len(shapes) > 1
    ):
        raise InputError(
            "the recorded steps have different chunks or gradients",
            "plan a step with the same number of tokens each time, on all ranks",
        )
    seconds = torch.tensor(
        [[each.seconds for each in program if isinstance(each, Compute | Send)]
         for program in rounds],
        dtype=torch.float64, device="cpu",
    )  # fmt: skip
    total = communicator.all_reduce_values(seconds, "the recorded times") / communicator.num_ranks
    return _with_seconds(rounds[0], iter(total.quantile(0.5, dim=0).tolist()))


def _with_seconds(program: Program, values: Iterator[float]) -> Program:
    """Return the program with other times; 0 where there are none."""
    return tuple(
        each._replace(seconds=next(values, 0.0)) if isinstance(each, Compute | Send) else each
        for each in program
    )


def _reduction(gradients: DenseGradients) -> LinearCost:
    """Return the time of all-reduces by their bytes, measured at two sizes beside computation."""
    communicator, device = gradients.communicator, gradients.device
    times = []
    for num_bytes in _REDUCED_BYTES:
        values = torch.zeros(num_bytes, dtype=torch.uint8, device=device).view(torch.float32)
        seconds = []
        for _ in range(_REDUCTIONS):
            communicator.barrier("the measurement of gradients")
            start = time.perf_counter()
            transfer = communicator.all_reduce(values, "the measurement of gradients")
            _compute_until(transfer, device)
            transfer.wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
        times.append(statistics.median(seconds))
    measured = torch.tensor(times, dtype=torch.float64, device="cpu")
    mean = communicator.all_reduce_values(measured, "the measured times") / communicator.num_ranks
    small, large = mean.tolist()
    beta = max(0.0, (large - small) / (_REDUCED_BYTES[1] - _REDUCED_BYTES[0]))
    alpha = max(0.0, small - beta * _REDUCED_BYTES[0])
    return LinearCost(alpha_seconds=alpha, beta_seconds=beta)


def _compute_until(transfer: Transfer, device: torch.device) -> None:
    """Compute on a CPU, as the backward pass does beside pieces: sums and copies share its core."""
    future = transfer.future()
    if device.type != "cpu" or future is None:
        return
    left, right = torch.ones(2, _COMPUTED, _COMPUTED, device="cpu")
    while not future.done():
        torch.mm(left, right)
