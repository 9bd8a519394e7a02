"""Pipeline stages of a model, and the time of a step through them (1F1B).

p stages, m micro-batches; w_i seconds of one micro-batch's forward and backward pass on stage i.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moetune.domain.interference import Interference
from moetune.domain.layout import stage_blocks
from moetune.domain.model import Transformer
from moetune.domain.model_plan import StageTime
from moetune.solve.layer.timeline import Task, Timeline, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The blocks and ends of one pipeline stage.

    Args:
        num_dense, num_moe: its blocks without and with experts.
        is_first: it has the embeddings.
        is_last: it has the head and the loss.
    """

    num_dense: int
    num_moe: int
    is_first: bool
    is_last: bool

    @property
    def num_blocks(self) -> int:
        """All of its blocks."""
        return self.num_dense + self.num_moe


def cut_into_stages(model: Transformer, num_stages: int) -> tuple[Stage, ...]:
    """Return the stages: consecutive blocks, the first stages one more where they do not divide."""
    cuts = stage_blocks(model.num_layers, num_stages=num_stages)
    counts = [sum(map(model.has_experts, blocks)) for blocks in cuts]
    return tuple(
        Stage(
            num_dense=len(blocks) - num_moe,
            num_moe=num_moe,
            is_first=index == 0,
            is_last=index == num_stages - 1,
        )
        for index, (blocks, num_moe) in enumerate(zip(cuts, counts, strict=True))
    )


def in_flight(*, stage: int, num_stages: int, num_micro_batches: int) -> int:
    """Return how many micro-batches' activations a stage keeps under 1F1B."""
    return min(num_micro_batches, num_stages - stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTime:
    """A step without gradients and optimizer.

    Args:
        slowest: index of the slowest stage.
        busy_seconds: its computation.
        send_seconds: exposed sends.
    """

    seconds: float
    slowest: int
    busy_seconds: float
    send_seconds: float


def one_f_one_b(
    *, stage_seconds: Sequence[float], hop_seconds: Sequence[float], num_micro_batches: int
) -> PipelineTime:
    """Return the time of m micro-batches through the stages (1F1B).

        T = (m − 1)·P + Σ w_i + 2·Σ c_i,  P = max_i (c_{i−1} + w_i + c_i)

    c_i is one send from stage i to the next, forward, while another one comes back. The sums
    are the first micro-batch's passage through all stages and back. P is the period after it:
    torch's schedule fuses a send with the receive from the same neighbour and waits for both, so
    no stage computes while it sends.

    For equal stages and free sends it is PPMoE's (m + p − 1)·w, and exact. For random unequal
    ones, with sends no longer than a forward pass, it is 2 % above an event simulation in the
    median, and between 8 % below and 28 % above: a slow stage also works during the first
    micro-batch's passage. Were sends hidden behind the next pass, it would be up to 31 % short.

    Args:
        stage_seconds: w_i, both passes of one micro-batch.
        hop_seconds: c_i, one fewer than stages.
    """
    slowest = max(range(len(stage_seconds)), key=stage_seconds.__getitem__)
    hops = (0.0, *hop_seconds, 0.0)
    period = max(map(sum, zip(hops, stage_seconds, hops[1:], strict=False)))
    rest, send_way = num_micro_batches - 1, 2 * sum(hop_seconds)
    busiest = stage_seconds[slowest]
    return PipelineTime(
        seconds=rest * period + sum(stage_seconds) + send_way,
        slowest=slowest,
        busy_seconds=num_micro_batches * busiest,
        send_seconds=rest * (period - busiest) + send_way,
    )


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
