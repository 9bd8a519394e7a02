"""Layouts of a decoder's training on many ranks: attention's and the experts', folded freely.

World size = dp·cp·tp·pp for everything but the experts, and edp·ep·etp·pp for them: ep·etp divides
dp·cp·tp, and may exceed or cross dp (Megatron-Core's parallel folding).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from itertools import repeat
from math import ceil
from typing import Any, ClassVar, Literal, TypeAlias, cast, get_args

from moetune.domain.architecture import Decoder
from moetune.domain.document import ALWAYS, UNLESS_DEFAULT, Written, decode
from moetune.domain.errors import InputError, check_positive
from moetune.domain.experts import RoutedExperts
from moetune.domain.optimizers import OptimizerName
from moetune.domain.packing import Packing
from moetune.domain.pipeline import (
    Schedule,
    StageLetters,
    aligned_stages,
    even_stages,
    read_stages,
    stage_words,
    usual_schedule,
)
from moetune.domain.placement import PlacementRule
from moetune.domain.routing import BALANCED, NATURAL, ExpertLoads, RankSkew
from moetune.domain.routing_record import RecordedLayers
from moetune.domain.spelling import flag_of
from moetune.domain.tuning import TRAINS_ALL, Tuning
from moetune.domain.withdrawn import common_degree

Recompute = Literal[
    "core_attn", "moe_act", "norm", "mla_up_proj", "mlp", "shared_experts", "moe", "selective",
    "full",
]  # fmt: skip
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
TokenDispatcher = Literal["all_to_all", "all_gather", "deepep", "hybrid_ep"]
"""Exchanges of tokens, the simplest first."""
TOKEN_DISPATCHERS: tuple[TokenDispatcher, ...] = get_args(TokenDispatcher)
DEDUPLICATING: frozenset[TokenDispatcher] = frozenset({"deepep", "hybrid_ep"})
"""Dispatchers with kernels of their own, which send a token once to each node and each rank."""
_MEAN_OF_NATURAL = 0.75
"""Load of the fullest rank beyond the mean, over what natural routing's law says, as a mean of a
run's layers. Runs of Qwen3-235B-A22B with forced and natural routing differ by 0.73, 0.74 and 0.78
of the law's at 16, 32 and 64 k tokens (yanring/Megatron-MoE-ModelZoo)."""
Overlap = Literal["none", "batch", "chunks"]
"""How exchanges of tokens are hidden: not at all, by another micro-batch's computation, or, cut
into chunks, by the experts of other chunks."""
CudaGraphs = Literal["none", "partial", "full"]
"""What the host replays instead of launching it: nothing, attention and the router, or a step."""
ZeroStage: TypeAlias = Literal[0, 1, 2, 3]
TrainingDtype = Literal["bfloat16", "float16", "fp8", "mxfp8", "nvfp4"]
TRAINING_DTYPES: tuple[TrainingDtype, ...] = get_args(TrainingDtype)
HALF_PRECISION: tuple[TrainingDtype, ...] = ("bfloat16", "float16")
"""Dtypes of whole trainings; the others are of GEMMs alone, and the rest is in bfloat16."""
_ROUNDING = 1e-6


def read_recompute(text: str) -> tuple[Recompute, ...]:
    """Return the modules of `--recompute`, in their order; InputError for an unknown one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["none"]:
        return ()
    unknown = [name for name in names if name not in RECOMPUTES]
    if unknown or not names:
        raise InputError(
            f"--recompute {text!r}: {unknown[0] if unknown else 'nothing'} is no module",
            f"use none, or a comma-separated list of {', '.join(RECOMPUTES)}", field="recompute",
        )  # fmt: skip
    return tuple(module for module in RECOMPUTES if module in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Chunks of each pass of the experts, at least 1: unequal ones in plans of before alone."""

    forward: int
    backward: int

    def __post_init__(self) -> None:
        check_positive(self, "forward", "backward")

    @classmethod
    def of_both(cls, degree: int) -> "Degrees":
        """Return the same number of chunks of either pass."""
        return cls(forward=degree, backward=degree)

    @property
    def common(self) -> int:
        """Chunks of either pass; InputError where they differ, as in plans of before."""
        return common_degree(self.forward, self.backward)


_SIZES = ("dp", "cp", "tp", "pp", "vpp", "ep", "etp")
_MODULES_OR_NONE = Written(
    kind=tuple[str, ...],
    write=lambda modules: modules or ("none",),
    read=lambda names: decode(
        cast("type", tuple[Recompute, ...]), () if names == ("none",) else names, "recompute"
    ),
)
_MEGATRON_LETTERS = Written(
    kind=str | None,
    write=lambda stages: None if stages is None else stage_words(stages),
    read=lambda text: None if text is None else read_stages(text),
)


@dataclass(frozen=True, kw_only=True)
class FoldedLayout:
    """Layout of a decoder's training over ranks, those of attention and of experts folded.

    In a document `recompute` is "none" alone for nothing, and `stages` are Megatron's letters.

    Args:
        dp: replicas of attention; those of the experts follow (`edp`).
        cp: ranks that share a sequence.
        tp: tensor-parallel ranks of attention and dense FFNs, which also share the sequence.
        vpp: stages of one pipeline rank.
        ep, etp: ranks that share the experts, and the width of one of them.
        recompute: modules whose activations are computed again in the backward pass.
        zero: what replicas shard: 0 nothing, 1 optimizer states, 2 gradients too, 3 all.
        cuda_graphs: full ones need static shapes, so that experts take a bounded number of rows.
        schedule: of the pipeline's passes; None for 1F1B, interleaved with vpp above 1.
        stages: modules of each stage; None for as many blocks in each as can be.
        offload_activations: share of the blocks whose activations wait in host memory.
        offload_optimizer: share of the optimizer that the host keeps and computes.
        degree: of overlap "chunks"; None for the fastest, and with another overlap.
    """

    DOCUMENT_PROPERTIES: ClassVar = ("edp",)

    dp: int = field(default=1, metadata=ALWAYS)
    cp: int = field(default=1, metadata=ALWAYS)
    tp: int = field(default=1, metadata=ALWAYS)
    pp: int = field(default=1, metadata=ALWAYS)
    vpp: int = field(default=1, metadata=ALWAYS)
    ep: int = field(default=1, metadata=ALWAYS)
    etp: int = field(default=1, metadata=ALWAYS)
    micro_batch: int = field(default=1, metadata=ALWAYS)
    recompute: tuple[Recompute, ...] = field(
        default=(), metadata={**ALWAYS, "written": _MODULES_OR_NONE}
    )
    dispatcher: TokenDispatcher = field(default="all_to_all", metadata=ALWAYS)
    overlap: Overlap = field(default="none", metadata=ALWAYS)
    zero: ZeroStage = field(default=1, metadata=ALWAYS)
    cuda_graphs: CudaGraphs = "none"
    schedule: Schedule | None = None
    stages: StageLetters | None = field(default=None, metadata={"written": _MEGATRON_LETTERS})
    offload_activations: float = 0.0
    offload_optimizer: float = 0.0
    degree: Degrees | None = field(default=None, metadata=UNLESS_DEFAULT)

    def __post_init__(self) -> None:
        check_positive(self, *_SIZES, "micro_batch")

    @property
    def words(self) -> str:
        """The sizes above 1 and the micro-batch: "dp 8 · pp 4 · micro-batch 1"."""
        sizes = [(name, getattr(self, name)) for name in _SIZES]
        above = [f"{name} {size}" for name, size in sizes if size > 1]
        return " · ".join([*above, f"micro-batch {self.micro_batch}"])

    @property
    def recompute_words(self) -> str:
        """The modules that are computed again: "moe_act, norm", or "none"."""
        return ", ".join(self.recompute) or "none"

    @property
    def all_words(self) -> str:
        """The words with what else is decided: "dp 8 · … · recompute none · deepep · ZeRO-1"."""
        return " · ".join([
            self.words, f"recompute {self.recompute_words}", self.dispatcher,
            f"overlap {self.overlap}", f"graphs {self.cuda_graphs}", f"ZeRO-{self.zero}",
        ])  # fmt: skip

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
        return self.schedule or usual_schedule(self.vpp)

    @property
    def on_host(self) -> float:
        """Shares of activations and the optimizer that are in host memory."""
        return self.offload_activations + self.offload_optimizer

    def changed(self, **values: object) -> "FoldedLayout":
        """Return a copy with unchecked values, sooner than `replace`: searches make thousands."""
        copy = object.__new__(FoldedLayout)
        object.__setattr__(copy, "__dict__", vars(self) | values)
        return copy

    def offloaded_layers(self, decoder: Decoder) -> int:
        """Return the blocks whose activations wait in host memory, rounded up."""
        return ceil(self.offload_activations * decoder.num_layers - _ROUNDING)

    def offloaded_share(self, decoder: Decoder) -> float:
        """Return the share of the blocks that these are."""
        return self.offloaded_layers(decoder) / decoder.num_layers

    def even_stages(self, decoder: Decoder) -> StageLetters:
        """Return as many stages, with as equal numbers of blocks as there can be."""
        even = even_stages(decoder.num_layers, len(decoder.predictions), self.num_stages)
        return aligned_stages(even, decoder.stage_starts)

    def stages_of(self, decoder: Decoder) -> StageLetters:
        """Return the modules of each stage."""
        return self.stages or self.even_stages(decoder)

    def explicit(self, decoder: Decoder) -> "FoldedLayout":
        """Return the layout with the name of its schedule and the modules of its stages."""
        stages = self.stages_of(decoder) if self.pp > 1 else None
        return replace(self, schedule=self.order, stages=stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRequest:
    """Sizes of a layout that the caller pins; None for what the solver chooses.

    Args:
        expert_placement: of experts whose layers were recorded.
    """

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
    offload_activations: float | None = None
    offload_optimizer: float | None = None
    expert_placement: PlacementRule | None = field(default=None, metadata=UNLESS_DEFAULT)

    def __post_init__(self) -> None:
        check_positive(self, *_SIZES[1:], "micro_batch")

    @property
    def pinned(self) -> dict[str, Any]:
        """What is pinned, by field."""
        values = ((item.name, getattr(self, item.name)) for item in fields(self))
        return {name: value for name, value in values if value is not None}

    @property
    def flags(self) -> dict[str, str]:
        """What is pinned, as flags with their values: "8" by "--tp"."""
        return {flag_of(name): _flag_text(name, value) for name, value in self.pinned.items()}

    @property
    def words(self) -> str:
        """What is pinned, as flags: "--tp 8 --recompute moe_act,norm"."""
        return " ".join(f"{flag} {text}" for flag, text in self.flags.items())

    def only(self, *names: str) -> "LayoutRequest":
        """Return the pins of these fields alone."""
        return self.without(name for name in self.pinned if name not in names)

    def without(self, names: Iterable[str]) -> "LayoutRequest":
        """Return the pins without some of them."""
        nothing: dict[str, Any] = dict.fromkeys(names)
        return replace(self, **nothing)


def _flag_text(name: str, value: object) -> str:
    if name == "stages":
        return repr(stage_words(cast("StageLetters", value)))
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """A training, and the number of its ranks; InputError of a size below 1, or other routing.

    Args:
        global_batch: sequences of a step.
        length: tokens of a sequence.
        dtype: of the GEMMs; in 8 bits attention's core, the router and the head are bfloat16.
        routing: to experts, of all layers or of each; a step waits for the fullest rank.
        optimizer: its name, which says the bytes that it keeps for each parameter.
        leaves_room: whether memory has room for natural routing as well as balanced.
        tuning: what of the model trains.
        packing: of documents into sequences; None where each has a single one.
    """

    decoder: Decoder
    world_size: int
    global_batch: int
    length: int
    dtype: TrainingDtype = "bfloat16"
    routing: ExpertLoads | RecordedLayers = BALANCED
    optimizer: OptimizerName = "adam"
    leaves_room: bool = False
    tuning: Tuning = TRAINS_ALL
    packing: Packing | None = None

    def __post_init__(self) -> None:
        check_positive(self, "world_size", "global_batch", "length")
        if isinstance(self.routing, ExpertLoads):
            self.routing.check(self.decoder.layer.num_experts)

    @property
    def attended(self) -> int:
        """Tokens of the sequence in which attention reads as much as it does."""
        return self.length if self.packing is None else max(1, round(self.packing.attended))

    @property
    def element(self) -> TrainingDtype:
        """The dtype of whatever is not in 8 bits or fewer."""
        return self.dtype if self.dtype in HALF_PRECISION else "bfloat16"

    @property
    def with_mean_layers(self) -> "TrainingJob":
        """The job with layers of a kind alike, each as full as all are on the mean."""
        return replace(self, decoder=self.decoder.with_records(repeat(None)))

    def skew(self, part: RoutedExperts, ep: int) -> RankSkew:
        """Return how full the fullest of ep ranks is in a layer."""
        if isinstance(self.routing, RecordedLayers):
            return self.routing.skew(part.record, ep)
        fullest = self.routing.skew(part.num_experts, part.mean_top_k, ep)
        if self.routing == NATURAL:
            return RankSkew(mean=1 + _MEAN_OF_NATURAL * (fullest - 1), p99=fullest)
        return RankSkew(mean=fullest, p99=fullest)

    def micro_batches(self, layout: FoldedLayout) -> int:
        """Return the micro-batches of a replica in one step."""
        return self.global_batch // (layout.micro_batch * layout.dp)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.length


def read_dtype(dtype: str) -> TrainingDtype:
    """Return the name of a training's dtype; raise InputError for another name."""
    if dtype not in TRAINING_DTYPES:
        what, hint = f"--dtype {dtype!r} is not for whole models", ", ".join(TRAINING_DTYPES)
        raise InputError(what, f"use {hint}", field="dtype")
    return dtype
