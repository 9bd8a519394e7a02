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
ZeroStage: TypeAlias = Literal[0, 1, 2, 3]
TrainingDtype = Literal["bfloat16", "fp8", "mxfp8"]
TRAINING_DTYPES: tuple[TrainingDtype, ...] = get_args(TrainingDtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedLayout:
    """How ranks share a decoder's training.

    Args:
        dp: replicas of attention; those of the experts follow (`edp`).
        cp: ranks that share a sequence.
        tp: tensor-parallel ranks of attention and dense FFNs, which also share the sequence
            between them (sequence parallelism).
        pp: pipeline ranks.
        vpp: stages of one pipeline rank; above 1, 1F1B is interleaved.
        ep, etp: ranks that share the experts, and the width of one of them.
        micro_batch: sequences of a micro-batch.
        recompute: modules whose activations are computed again in the backward pass.
        zero: what replicas shard: 0 nothing, 1 optimizer states, 2 gradients too, 3 all.
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
    if layout.num_stages > decoder.num_layers:
        yield BrokenRule(
            f"pp·vpp ({layout.num_stages}) is larger than the {decoder.num_layers} layers",
            f"use pp·vpp up to {decoder.num_layers}",
        )
    for module in layout.recompute:
        if module not in decoder.modules:
            known = [one for one in RECOMPUTES if one in decoder.modules]
            yield BrokenRule(
                f"{decoder.name} has no {module} to recompute", f"use some of {', '.join(known)}"
            )
    if layout.vpp > 1 and layout.pp == 1:
        yield BrokenRule("vpp above 1 needs a pipeline", "use pp above 1, or vpp 1")


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
    batches = job.global_batch // per_batch
    if layout.vpp > 1 and batches % layout.pp:
        yield BrokenRule(
            f"{batches} micro-batches do not divide by pp ({layout.pp}), as interleaved 1F1B asks",
            f"use vpp 1, or global_batch {-(-batches // layout.pp) * layout.pp * per_batch}",
        )


def _either(size: int, near: int) -> str:
    return " or ".join(map(str, nearest_divisors(size, near)))
