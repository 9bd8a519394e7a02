"""Stages of a pipeline with their parameters, and the simulated time of its micro-batches."""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import NamedTuple, TypeVar

from moetune.domain.architecture import Block, Decoder
from moetune.domain.attention import LatentAttention
from moetune.domain.once import Tables, once_for
from moetune.domain.pipeline import (
    SPLITTING,
    Schedule,
    StageLetters,
    aligned_stages,
    rank_of_stage,
    stages_of_sizes,
)
from moetune.domain.training import FoldedLayout
from moetune.domain.tuning import TRAINS_ALL, Tuning
from moetune.solve.model.passes import Passes
from moetune.solve.model.schedule import KINDS, Pass, Timetable, timetable

_Of = TypeVar("_Of")
_ALONE = FoldedLayout()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBlocks:
    """Blocks of the model, embedding and head in a stage, or in all stages of a rank.

    Args:
        counts: number of blocks of each of `Decoder.kinds`.
        has_embedding, has_head: whether they are in it.
        has_predictions: whether the blocks of multi-token prediction are in it.
    """

    counts: tuple[int, ...]
    has_embedding: bool
    has_head: bool
    has_predictions: bool

    def heads(self, decoder: Decoder) -> int:
        """Return the number of heads; each step of multi-token prediction adds a head."""
        return self.has_head + self.has_predictions * len(decoder.predictions)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBlocks(StageBlocks):
    """Blocks of the pipeline ranks that have equal blocks."""

    ranks: tuple[int, ...]


class Cut(NamedTuple):
    """Stages of a pipeline.

    Args:
        distinct: the distinct stages, in order of appearance.
        which: the index of each stage in `distinct`.
    """

    distinct: tuple[StageBlocks, ...]
    which: tuple[int, ...]


class Parameters(NamedTuple):
    """Parameters on one device: all except the experts, and the experts."""

    dense: float
    experts: float

    def over(self, num: int) -> "Parameters":
        """Return the mean over `num` ranks."""
        return Parameters(self.dense / num, self.experts / num)


@dataclass(frozen=True, slots=True)
class DecoderStages(Tables):
    """A decoder's blocks by stage and by pipeline rank."""

    decoder: Decoder

    @property
    def whole(self) -> RankBlocks:
        """All blocks, as if on one rank."""
        [whole] = self.ranks(_ALONE)
        return whole

    @once_for("num_stages", "stages")
    def cut(self, layout: FoldedLayout) -> Cut:
        """Return the blocks of each stage."""
        stages = self._stages(layout.stages_of(self.decoder))
        distinct: dict[StageBlocks, int] = {}
        which = tuple(distinct.setdefault(stage, len(distinct)) for stage in stages)
        return Cut(tuple(distinct), which)

    @once_for("pp", "vpp", "schedule", "stages")
    def ranks(self, layout: FoldedLayout) -> tuple[RankBlocks, ...]:
        """Return the blocks of the pipeline ranks; ranks with equal blocks share an entry."""
        return _by_rank(self.cut(layout), layout)

    @once_for("tp", "ep", "etp")
    def parameters(
        self, layout: FoldedLayout, rank: StageBlocks, tuning: Tuning = TRAINS_ALL
    ) -> Parameters:
        """Return the parameters on one device of a pipeline rank that train without adapters."""
        decoder, heads = self.decoder, rank.has_head or rank.has_predictions
        tables = rank.has_embedding * tuning.trains("embedding") + heads * tuning.trains("head")
        dense = tables * decoder.vocab_size * decoder.d_model / layout.tp
        if rank.has_predictions and tuning.trains_all:
            dense += sum(prediction.projection for prediction in decoder.predictions) / layout.tp
        return summed(rank, self.parameters_of_blocks(layout, tuning), dense)

    @once_for("tp", "ep", "etp")
    def parameters_of_blocks(
        self, layout: FoldedLayout, tuning: Tuning = TRAINS_ALL
    ) -> tuple[Parameters, ...]:
        """Return the parameters of each kind of block, then of each prediction block."""
        amounts = (_amounts(block, tuning) for block in self.decoder.kinds_and_predictions)
        return tuple(
            Parameters(whole + shared / layout.tp, experts / (layout.ep * layout.etp))
            for whole, shared, experts in amounts
        )

    def _stages(self, letters: StageLetters) -> list[StageBlocks]:
        order, kinds = self.decoder.kind_of_block, range(len(self.decoder.kinds))
        stages, first = [], 0
        for word in letters:
            size = word.count("t")
            counts = Counter(order[first : first + size])
            first += size
            stages.append(
                StageBlocks(
                    counts=tuple(counts[kind] for kind in kinds),
                    has_embedding="E" in word, has_head="L" in word, has_predictions="m" in word,
                )
            )  # fmt: skip
        return stages


def counted(stage: StageBlocks, blocks: Sequence[_Of]) -> list[tuple[int, _Of]]:
    """Return each kind's value, then each prediction's, with the number of blocks in a stage."""
    predictions = (int(stage.has_predictions),) * (len(blocks) - len(stage.counts))
    return [*zip((*stage.counts, *predictions), blocks, strict=True)]


def summed(stage: StageBlocks, blocks: Sequence[Parameters], dense: float = 0.0) -> Parameters:
    """Return the parameters of a stage's blocks, plus `dense` for parameters outside blocks."""
    experts = 0.0
    for count, block in counted(stage, blocks):
        dense, experts = dense + count * block.dense, experts + count * block.experts
    return Parameters(dense, experts)


@cache
def _amounts(block: Block, tuning: Tuning) -> tuple[float, float, float]:
    """Return trained parameters: whole on every rank, cut over tensor ranks, and of experts."""
    amounts, routed = tuning.trained(block.parameters), block.routed
    experts = 0 if routed is None else routed.num_experts * routed.expert_parameters
    experts *= tuning.trains("experts")
    latent = sum(
        part.latent_parameters for part in block.parts if isinstance(part, LatentAttention)
    )
    latent *= tuning.trains("attention")
    whole = amounts.router + amounts.norms + amounts.routed - experts + latent
    return whole, amounts.attention - latent + amounts.dense + amounts.shared, experts


def _by_rank(cut: Cut, layout: FoldedLayout) -> tuple[RankBlocks, ...]:
    stages_of_rank: list[list[StageBlocks]] = [[] for _ in range(layout.pp)]
    for stage, which in enumerate(cut.which):
        stages_of_rank[rank_of_stage(stage, layout.pp, layout.order)].append(cut.distinct[which])
    same: dict[tuple[tuple[int, ...], bool, bool, bool], list[int]] = {}
    for rank, parts in enumerate(stages_of_rank):
        counts = tuple(map(sum, zip(*(part.counts for part in parts), strict=True)))
        ends = (
            any(part.has_embedding for part in parts), any(part.has_head for part in parts),
            any(part.has_predictions for part in parts),
        )  # fmt: skip
        same.setdefault((counts, *ends), []).append(rank)
    return tuple(
        RankBlocks(
            counts=counts, has_embedding=begins, has_head=ends, has_predictions=predicts,
            ranks=tuple(ranks),
        )
        for (counts, begins, ends, predicts), ranks in same.items()
    )  # fmt: skip


def balanced_stages(
    decoder: Decoder,
    layout: FoldedLayout,
    *,
    block_seconds: float,
    embedding_seconds: float,
    head_seconds: float,
) -> StageLetters:
    """Return stages that balance the ranks' time as well as whole blocks allow.

    Blocks go, in turn, to the rank with the least work, and on a rank to the stage with the fewest
    blocks. The first and the last stage may be empty, all others have at least one block.

    Args:
        block_seconds: mean seconds of a block.
        head_seconds: seconds of the head with the predictions.
    """
    num, blocks = layout.num_stages, decoder.num_layers
    sizes = [0, *[1] * (num - 2), 0]
    seconds = [size * block_seconds for size in sizes]
    seconds[0] += embedding_seconds
    seconds[-1] += head_seconds
    stages_of_rank: list[list[int]] = [[] for _ in range(layout.pp)]
    for stage in range(num):
        stages_of_rank[rank_of_stage(stage, layout.pp, layout.order)].append(stage)
    ranks = [
        (sum(seconds[stage] for stage in mine), rank) for rank, mine in enumerate(stages_of_rank)
    ]
    heapq.heapify(ranks)
    for _ in range(blocks - sum(sizes)):
        busy, rank = ranks[0]
        mine = stages_of_rank[rank]
        stage = mine[0] if len(mine) == 1 else min(mine, key=seconds.__getitem__)
        sizes[stage] += 1
        seconds[stage] += block_seconds
        heapq.heapreplace(ranks, (busy + block_seconds, rank))
    stages = stages_of_sizes(sizes, len(decoder.predictions))
    return aligned_stages(stages, decoder.stage_starts)


_ROUNDS = 4
"""Rounds of p micro-batches that are simulated; further rounds repeat the last."""


@dataclass(frozen=True, kw_only=True)
class StagePipeline:
    """The stages and the schedule on p ranks that are simulated.

    Args:
        stages: seconds of each stage's passes for a micro-batch, in the schedule's order.
        send_seconds: seconds to send one micro-batch to the next stage on another rank.
        hides_sends: whether a rank computes while it sends; 1F1B of torch and Megatron does not.
    """

    schedule: Schedule
    pp: int
    stages: tuple[Passes, ...]
    num_micro_batches: int
    send_seconds: float
    hides_sends: bool

    @property
    def vpp(self) -> int:
        """Number of stages on a rank."""
        return len(self.stages) // self.pp

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return tuple(
            rank_of_stage(stage, self.pp, self.schedule) for stage in range(len(self.stages))
        )

    @cached_property
    def lengths(self) -> tuple[float, ...]:
        """Seconds of each kind of pass of `PASS_WORDS`, for each stage."""
        kinds = ("forward", "backward", "grad_input", "grad_weight")
        return tuple(getattr(stage, kind) for kind in kinds for stage in self.stages)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds of each rank's passes, over all micro-batches."""
        busy = [0.0] * self.pp
        for rank, stage in zip(self.ranks, self.stages, strict=True):
            busy[rank] += stage.forward + stage.grad_input + stage.grad_weight
        return tuple(self.num_micro_batches * seconds for seconds in busy)

    @property
    def busiest_passes(self) -> tuple[float, float]:
        """Seconds of the busiest rank's forward and backward passes for one micro-batch."""
        busy = self.busy
        busiest = busy.index(max(busy))
        stages = [
            stage for rank, stage in zip(self.ranks, self.stages, strict=True) if rank == busiest
        ]
        return sum(stage.forward for stage in stages), sum(stage.backward for stage in stages)


def play(pipeline: StagePipeline) -> float:
    """Return the seconds of all micro-batches.

    If there are many, only some rounds are simulated, because later rounds each take the same time.
    If another rank, slower by little, binds later, the result is up to 1 % short.
    """
    num, round_size = pipeline.num_micro_batches, pipeline.pp
    played = _ROUNDS * round_size + num % round_size
    if num <= played + round_size:
        return max(_ends(pipeline, num))
    first, second = (max(_ends(pipeline, count)) for count in (played, played + round_size))
    rounds = (num - played - round_size) / round_size
    return max(second + rounds * (second - first), least_seconds(pipeline))


class PassSpan(NamedTuple):
    """A pass of a stage for one micro-batch, with its start and its end."""

    kind: Pass
    rank: int
    stage: int
    batch: int
    start_seconds: float
    end_seconds: float


def pass_spans(pipeline: StagePipeline, num_micro_batches: int) -> tuple[PassSpan, ...]:
    """Return all passes of the micro-batches (whole rounds if vpp > 1), as early as possible."""
    turns, lengths = _timetable(pipeline, num_micro_batches).turns, pipeline.lengths
    spans = []
    for turn, end in zip(turns, _ends(pipeline, num_micro_batches), strict=True):
        rank, length, batch, *_ = turn
        kind, stage = divmod(length, len(pipeline.stages))
        spans.append(PassSpan(KINDS[kind], rank, stage, batch, end - lengths[length], end))
    return tuple(spans)


def least_seconds(pipeline: StagePipeline) -> float:
    """Return a lower bound on the time of the pipeline.

        T ≥ max_r (m·(w_r + n_r·c) + Σ_{s < r} (f_s + c) + what must follow)

    Rank r begins when a micro-batch reaches stage r. If backward passes are whole, the gradients of
    its last micro-batch have to travel back the same way. n_r·c is the time of the rank's sends, or
    0 if sends are hidden. With equal stages and no sends, 1F1B and interleaved 1F1B reach the
    bound.
    """
    send, num = pipeline.send_seconds, pipeline.num_micro_batches
    whole = pipeline.schedule not in SPLITTING
    least = before = 0.0
    for rank, (busy, sends) in enumerate(zip(pipeline.busy, _sends(pipeline.ranks), strict=True)):
        sending = 0.0 if pipeline.hides_sends else send * (num * sends - (whole and rank > 0))
        least = max(least, busy + sending + before)
        stage = pipeline.stages[rank]
        before += (sum(stage) if whole else stage.forward) + (1 + whole) * send
    return least


@cache
def _sends(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of sends and receives of each rank for one micro-batch."""
    counts = [0] * (max(ranks) + 1)
    for here, there in pairwise(ranks):
        if here != there:
            counts[here] += 1
            counts[there] += 1
    return tuple(counts)


def _timetable(pipeline: StagePipeline, num_micro_batches: int) -> Timetable:
    return timetable(pipeline.schedule, pipeline.pp, pipeline.vpp, num_micro_batches)


def _ends(pipeline: StagePipeline, num_micro_batches: int) -> list[float]:
    """Return the end of each pass, in the order of the timetable.

    A rank runs its passes in order, each once its input has arrived. A message leaves when the
    previous message between the same ranks has arrived.
    """
    table = _timetable(pipeline, num_micro_batches)
    lengths, send, hides = pipeline.lengths, pipeline.send_seconds, pipeline.hides_sends
    clocks, free = [0.0] * pipeline.pp, [0.0] * table.num_links
    there, ends = [0.0] * table.num_places, list[float]()
    for rank, length, _, needs, gives, link in table.turns:
        end = clocks[rank]
        if there[needs] > end:  # noqa: PLR1730 - with `max` the loop takes twice as long
            end = there[needs]
        end += lengths[length]
        ends.append(end)
        if link is None:
            there[gives] = clocks[rank] = end
            continue
        leaves = free[link]
        if end > leaves:  # noqa: PLR1730 - as above
            leaves = end
        there[gives] = free[link] = arrival = leaves + send
        clocks[rank] = end if hides else arrival
    return ends
