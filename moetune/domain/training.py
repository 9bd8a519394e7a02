"""Layouts of a decoder's training on many ranks: attention's and the experts', folded freely.

World size = dp·cp·tp·pp for everything but the experts, and edp·ep·etp·pp for them: ep·etp divides
dp·cp·tp, and may exceed or cross dp (Megatron-Core's parallel folding).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from moetune.domain.architecture import Decoder
from moetune.domain.errors import InputError, check_positive
from moetune.domain.layout import BrokenRule, nearest_divisors
from moetune.domain.optimizers import OptimizerName
from moetune.domain.pipeline import (
    V_SCHEDULES,
    Schedule,
    StageLetters,
    even_stages,
    most_stages,
    stage_words,
    wrong_stages,
)
from moetune.domain.routing import BALANCED, ExpertLoads

Recompute = Literal[
    "core_attn", "moe_act", "norm", "mla_up_proj", "mlp", "shared_experts", "moe", "full"
]
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
TokenDispatcher = Literal["all_to_all", "all_gather", "hierarchical", "deepep", "hybrid_ep"]
"""Exchanges of tokens, the simplest first."""
TOKEN_DISPATCHERS: tuple[TokenDispatcher, ...] = get_args(TokenDispatcher)
Overlap = Literal["none", "batch"]
"""Of expert-parallel exchanges: not at all, or with another micro-batch's computation."""
OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)
CudaGraphs = Literal["none", "partial", "full"]
"""What the host replays instead of launching it: nothing, attention and the router, or a step."""
CUDA_GRAPHS: tuple[CudaGraphs, ...] = get_args(CudaGraphs)
ZeroStage: TypeAlias = Literal[0, 1, 2, 3]
TrainingDtype = Literal["bfloat16", "fp8", "mxfp8"]
TRAINING_DTYPES: tuple[TrainingDtype, ...] = get_args(TrainingDtype)
_OF_V = 2
"""Stages of a rank, there and back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedLayout:
    """How ranks share a decoder's training.

    Args:
        dp: replicas of attention; those of the experts follow (`edp`).
        cp: ranks that share a sequence.
        tp: tensor-parallel ranks of attention and dense FFNs, which also share the sequence
            between them (sequence parallelism).
        pp: pipeline ranks.
        vpp: stages of one pipeline rank.
        ep, etp: ranks that share the experts, and the width of one of them.
        micro_batch: sequences of a micro-batch.
        recompute: modules whose activations are computed again in the backward pass.
        zero: what replicas shard: 0 nothing, 1 optimizer states, 2 gradients too, 3 all.
        cuda_graphs: full ones need static shapes, so that experts take a bounded number of rows.
        schedule: of the pipeline's passes; None for 1F1B, interleaved with vpp above 1.
        stages: modules of each stage; None for as many blocks in each as can be.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    micro_batch: int = 1
    recompute: tuple[Recompute, ...] = ()
    dispatcher: TokenDispatcher = "all_to_all"
    overlap: Overlap = "none"
    zero: ZeroStage = 1
    cuda_graphs: CudaGraphs = "none"
    schedule: Schedule | None = None
    stages: StageLetters | None = None

    def __post_init__(self) -> None:
        check_positive(self, "dp", "cp", "tp", "pp", "vpp", "ep", "etp", "micro_batch")

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline rank's stages."""
        return self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """Replicas of the experts."""
        return self.stage_ranks // (self.ep * self.etp)

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.pp * self.vpp

    @property
    def order(self) -> Schedule:
        """The schedule by its name."""
        return self.schedule or ("interleaved" if self.vpp > 1 else "1f1b")

    def even_stages(self, decoder: Decoder) -> StageLetters:
        """Return as many stages, with as equal numbers of blocks as there can be."""
        return even_stages(decoder.num_layers, len(decoder.predictions), self.num_stages)

    def stages_of(self, decoder: Decoder) -> StageLetters:
        """Return the modules of each stage."""
        return self.stages or self.even_stages(decoder)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRequest:
    """Sizes of a layout that the caller pins; None for what the solver chooses."""

    cp: int | None = None
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    ep: int | None = None
    etp: int | None = None
    micro_batch: int | None = None
    recompute: tuple[Recompute, ...] | None = None
    dispatcher: TokenDispatcher | None = None
    overlap: Overlap | None = None
    zero: ZeroStage | None = None
    cuda_graphs: CudaGraphs | None = None
    schedule: Schedule | None = None
    stages: StageLetters | None = None

    def __post_init__(self) -> None:
        check_positive(self, "cp", "tp", "pp", "vpp", "ep", "etp", "micro_batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """What is trained, and on how many ranks.

    Args:
        global_batch: sequences of a step.
        length: tokens of a sequence.
        dtype: of the GEMMs; 8-bit formats keep attention's core, the router and the head in
            bfloat16.
        routing: of tokens to experts; a step waits for the fullest rank.
        optimizer: its name, which says the bytes that it keeps for each parameter.

    Raises:
        InputError: a size below 1, or a routing of another number of experts.
    """

    decoder: Decoder
    world_size: int
    global_batch: int
    length: int
    dtype: TrainingDtype = "bfloat16"
    routing: ExpertLoads = BALANCED
    optimizer: OptimizerName = "adam"

    def __post_init__(self) -> None:
        check_positive(self, "world_size", "global_batch", "length")
        self.routing.check(self.decoder.layer.num_experts)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.length


def broken_rules(layout: FoldedLayout, job: TrainingJob) -> Iterator[BrokenRule]:
    """Yield the rules that a layout breaks for a job, the most basic one first."""
    yield from _rank_rules(layout, job)
    yield from _model_rules(layout, job.decoder)
    yield from _stage_rules(layout, job.decoder)
    yield from _batch_rules(layout, job)


def check_layout(layout: FoldedLayout, job: TrainingJob) -> None:
    """Raise InputError that names the first rule that the layout breaks, with the nearest sizes."""
    broken = next(broken_rules(layout, job), None)
    if broken is not None:
        raise InputError(broken.what, broken.hint)


def _rank_rules(layout: FoldedLayout, job: TrainingJob) -> Iterator[BrokenRule]:
    sharers = layout.cp * layout.tp * layout.pp
    if layout.world_size != job.world_size:
        near = _either(job.world_size, sharers)
        yield BrokenRule(
            f"cp·tp·pp ({sharers}) does not divide world_size ({job.world_size})",
            f"use sizes whose product is {near}",
        )
        return
    experts = layout.ep * layout.etp
    if layout.stage_ranks % experts:
        yield BrokenRule(
            f"ep·etp ({experts}) does not divide dp·cp·tp ({layout.stage_ranks})",
            f"use ep {_either(layout.stage_ranks // layout.etp or 1, layout.ep)}",
        )


def _model_rules(layout: FoldedLayout, decoder: Decoder) -> Iterator[BrokenRule]:
    experts = decoder.layer.num_experts
    if decoder.num_moe_layers and experts % layout.ep:
        yield BrokenRule(
            f"num_experts ({experts}) does not divide by ep ({layout.ep})",
            f"use ep {_either(experts, layout.ep)}",
        )
    if not decoder.num_moe_layers and layout.ep * layout.etp > 1:
        yield BrokenRule("the model is dense: there are no experts to share", "use ep 1 and etp 1")
    if decoder.layer.d_hidden % layout.etp:
        yield BrokenRule(
            f"the experts' width ({decoder.layer.d_hidden}) does not divide by etp ({layout.etp})",
            f"use etp {_either(decoder.layer.d_hidden, layout.etp)}",
        )
    heads = [part.num_heads for block in decoder.kinds for part in block.parts
             if hasattr(part, "num_heads") and part.num_heads]  # fmt: skip
    for count in heads:
        if count % layout.tp:
            yield BrokenRule(
                f"num_heads ({count}) does not divide by tp ({layout.tp})",
                f"use tp {_either(count, layout.tp)}",
            )
    for module in layout.recompute:
        if module not in decoder.modules:
            known = [one for one in RECOMPUTES if one in decoder.modules]
            yield BrokenRule(
                f"{decoder.name} has no {module} to recompute", f"use some of {', '.join(known)}"
            )


def _stage_rules(layout: FoldedLayout, decoder: Decoder) -> Iterator[BrokenRule]:
    stages, most = layout.stages, most_stages(decoder.num_layers)
    if layout.pp == 1:
        what = "vpp above 1" if layout.vpp > 1 else f"schedule {layout.order}"
        if layout.order != "1f1b" or stages is not None:
            yield BrokenRule(
                f"{what} needs a pipeline" if stages is None else "stages need a pipeline",
                "use pp above 1, or omit it",
            )
        return
    if stages is not None and len(stages) != layout.num_stages:
        yield BrokenRule(
            f"{len(stages)} stages are given, and pp·vpp is {layout.num_stages}",
            f"give {layout.num_stages} stages, or use pp {_either(len(stages), layout.pp)}",
        )
    elif stages is not None:
        wrong = wrong_stages(stages, decoder.num_layers, len(decoder.predictions))
        if wrong is not None:
            even = stage_words(layout.even_stages(decoder))
            yield BrokenRule(f"stages of {decoder.name}: {wrong}", f"write them such as {even!r}")
    elif layout.num_stages > most:
        yield BrokenRule(
            f"pp·vpp ({layout.num_stages}) is larger than the {decoder.num_layers} layers with "
            "embedding and head",
            f"use pp·vpp up to {most}",
        )
    yield from _schedule_rules(layout)


def _schedule_rules(layout: FoldedLayout) -> Iterator[BrokenRule]:
    if layout.order == "1f1b" and layout.vpp > 1:
        yield BrokenRule("schedule 1f1b has one stage a rank", "use vpp 1, or interleaved")
    if layout.order == "interleaved" and layout.vpp == 1:
        yield BrokenRule("schedule interleaved has several stages a rank", "use vpp 2 or more")
    if layout.order in V_SCHEDULES and layout.vpp != _OF_V:
        yield BrokenRule(f"schedule {layout.order} has two stages a rank", "use vpp 2")


def _batch_rules(layout: FoldedLayout, job: TrainingJob) -> Iterator[BrokenRule]:
    per_batch = layout.micro_batch * layout.dp
    if job.global_batch % per_batch:
        yield BrokenRule(
            f"micro_batch·dp ({per_batch}) does not divide global_batch ({job.global_batch})",
            f"use micro_batch {_either(max(1, job.global_batch // layout.dp), layout.micro_batch)}"
            f" or global_batch {-(-job.global_batch // per_batch) * per_batch}",
        )
        return
    sharers = layout.cp * layout.tp
    if job.length % sharers:
        yield BrokenRule(
            f"sequences of {job.length} tokens do not divide by cp·tp ({sharers})",
            f"use cp·tp {_either(job.length, sharers)}",
        )
    batches, pp = job.global_batch // per_batch, layout.pp
    if layout.order in ("interleaved", "zero_bubble") and batches % pp:
        yield BrokenRule(
            f"{batches} micro-batches do not divide by pp ({pp}), as {layout.order} asks",
            f"use 1f1b with vpp 1, or global_batch {-(-batches // pp) * pp * per_batch}",
        )
    if layout.order == "dualpipe_v" and batches < layout.num_stages:
        yield BrokenRule(
            f"{batches} micro-batches are fewer than the {layout.num_stages} stages of dualpipe_v",
            f"use a global_batch from {layout.num_stages * per_batch}, or another schedule",
        )


def _either(size: int, near: int) -> str:
    return " or ".join(map(str, nearest_divisors(size, near)))
