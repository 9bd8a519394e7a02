"""A whole model's step as torch's 1F1B runs it: every stage's passes and sends, in their order."""

from collections.abc import Iterator, Sequence

from moetune.domain.costs import Interference
from moetune.domain.model_plan import StageTime
from moetune.solve.timeline import Task, Timeline, simulate

FORWARD, BACKWARD, SEND = "forward", "backward", "send"


def stage_timeline(stages: Sequence[StageTime], *, num_micro_batches: int) -> Timeline:
    """Return the simulated passes of all micro-batches, without gradients and optimizer.

    A stage does not compute while it sends, and begins a pass when what it needs has come. Spans
    are called "forward 1", "backward 1" and "send 1", by the micro-batch, of the stream
    "stage 1". Equal stages with free sends end when torch's schedule does; random ones end
    between 8 % before and 7 % after it, because there a stage also waits for what its neighbour
    sends meanwhile, and both ways of a link are used at once.
    """
    tasks = [
        task for index in range(len(stages)) for task in _tasks(stages, index, num_micro_batches)
    ]
    found = simulate(tasks, interference=Interference())
    spans = tuple(span._replace(name=span.name.partition(",")[0]) for span in found.spans)
    return Timeline(spans=spans, makespan_seconds=found.makespan_seconds)


def order_of_stage(
    index: int, *, num_stages: int, num_micro_batches: int
) -> Iterator[tuple[str, int]]:
    """Yield a stage's passes, each with its micro-batch, as torch's `Schedule1F1B` orders them."""
    warm_up = min(num_micro_batches, num_stages - index)
    for batch in range(warm_up):
        yield FORWARD, batch
    for batch in range(num_micro_batches):
        yield BACKWARD, batch
        if warm_up + batch < num_micro_batches:
            yield FORWARD, warm_up + batch


def _tasks(stages: Sequence[StageTime], index: int, num_micro_batches: int) -> Iterator[Task]:
    stage, stream = stages[index], f"stage {index + 1}"
    order = order_of_stage(index, num_stages=len(stages), num_micro_batches=num_micro_batches)
    for phase, batch in order:
        is_forward = phase == FORWARD
        before, after = (index - 1, index + 1) if is_forward else (index + 1, index - 1)
        yield Task(
            name=f"{phase} {batch + 1}, {index}",
            resource="comp",
            stream=stream,
            seconds=stage.forward_seconds if is_forward else stage.backward_seconds,
            after=(_sent(phase, batch, before),) if 0 <= before < len(stages) else (),
        )
        if 0 <= after < len(stages):
            send_seconds = (stage if is_forward else stages[index - 1]).send_seconds
            yield Task(
                name=_sent(phase, batch, index), resource="comm", stream=stream,
                seconds=send_seconds,
            )  # fmt: skip


def _sent(phase: str, batch: int, index: int) -> str:
    return f"{SEND} {batch + 1}, {phase} from {index}"
