"""Layouts of a decoder's training on many ranks, folded freely for attention and for experts.

World size = dp·cp·tp·pp for everything except the experts, and edp·ep·etp·pp for the experts. The
product ep·etp divides dp·cp·tp, and may exceed or cross dp (Megatron-Core's parallel folding).
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
"""Dispatchers with special kernels, which send a token once to each node and each rank."""
_MEAN_OF_NATURAL = 0.75
"""Excess load of the fullest rank over the mean, divided by the excess in natural routing's law, as
a mean of a run's layers. Runs of Qwen3-235B-A22B with forced and natural routing differ by 0.73,
0.74 and 0.78 of the law at 16, 32 and 64 k tokens (yanring/Megatron-MoE-ModelZoo)."""
Overlap = Literal["none", "batch", "chunks"]
"""What hides exchanges of tokens: nothing, another micro-batch's computation, or, with tokens in
chunks, the experts of other chunks."""
CudaGraphs = Literal["none", "partial", "full"]
"""Kernels that the host replays, not launches: none, attention and the router, or a whole step."""
ZeroStage: TypeAlias = Literal[0, 1, 2, 3]
TrainingDtype = Literal["bfloat16", "float16", "fp8", "mxfp8", "nvfp4"]
TRAINING_DTYPES: tuple[TrainingDtype, ...] = get_args(TrainingDtype)
HALF_PRECISION: tuple[TrainingDtype, ...] = ("bfloat16", "float16")
"""Dtypes of whole trainings. Other dtypes are for GEMMs only, and the rest is in bfloat16."""
_ROUNDING = 1e-6


def read_recompute(text: str) -> tuple[Recompute, ...]:
    """Return the modules of `--recompute`, in fixed order; raises InputError for other names."""
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
    """Chunks of each pass of the experts, at least 1; passes differ only in older plans."""

    forward: int
    backward: int

    def __post_init__(self) -> None:
        check_positive(self, "forward", "backward")

    @classmethod
    def of_both(cls, degree: int) -> "Degrees":
        """Return the same number of chunks for both passes."""
        return cls(forward=degree, backward=degree)

    @property
    def common(self) -> int:
        """Chunks of each pass; raises InputError if the passes differ, as in older plans."""
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
    """Layout of a decoder's training over ranks, with attention's and experts' groups folded.

    A document writes an empty `recompute` as "none", and `stages` in Megatron's letters.

    Args:
        dp: replicas of attention; replicas of the experts follow from it (`edp`).
        cp: ranks that share a sequence.
        tp: tensor-parallel ranks of attention and dense FFNs, which also share the sequence.
        vpp: stages of one pipeline rank.
        ep, etp: ranks that share the experts, and ranks that share an expert's width.
        recompute: modules whose activations the backward pass recomputes.
        zero: what replicas shard: 0 nothing, 1 optimizer states, 2 also gradients, 3 all.
        cuda_graphs: "full" needs static shapes, so that the rows of experts are bounded.
        schedule: schedule of the pipeline; None for 1F1B, or interleaved with vpp above 1.
        stages: modules of each stage; None for equal numbers of blocks where possible.
        offload_activations: share of the blocks whose activations wait in host memory.
        offload_optimizer: share of the optimizer that the host keeps and updates.
        degree: chunks of overlap "chunks"; None for the fastest, and with other overlaps.
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
        """The recomputed modules: "moe_act, norm", or "none"."""
        return ", ".join(self.recompute) or "none"

    @property
    def all_words(self) -> str:
        """All decisions in words: "dp 8 · … · recompute none · deepep · ZeRO-1"."""
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
        """Ranks that share a pipeline rank's stages."""
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
        """Sum of the shares of activations and of the optimizer in host memory."""
        return self.offload_activations + self.offload_optimizer

    def changed(self, **values: object) -> "FoldedLayout":
        """Return a copy with unchecked values, faster than `replace`: searches make thousands."""
        copy = object.__new__(FoldedLayout)
        object.__setattr__(copy, "__dict__", vars(self) | values)
        return copy

    def offloaded_layers(self, decoder: Decoder) -> int:
        """Return the number of blocks whose activations wait in host memory, rounded up."""
        return ceil(self.offload_activations * decoder.num_layers - _ROUNDING)

    def offloaded_share(self, decoder: Decoder) -> float:
        """Return the share of blocks whose activations wait in host memory."""
        return self.offloaded_layers(decoder) / decoder.num_layers

    def even_stages(self, decoder: Decoder) -> StageLetters:
        """Return the layout's number of stages, with blocks divided as equally as possible."""
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
    """Sizes of a layout that the caller pins; None for a choice of the solver.

    Args:
        expert_placement: rule for experts whose layers were recorded.
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
        """The pinned values, by field."""
        values = ((item.name, getattr(self, item.name)) for item in fields(self))
        return {name: value for name, value in values if value is not None}

    @property
    def flags(self) -> dict[str, str]:
        """The pinned values as texts by flag: "8" by "--tp"."""
        return {flag_of(name): _flag_text(name, value) for name, value in self.pinned.items()}

    @property
    def words(self) -> str:
        """The pins as flags: "--tp 8 --recompute moe_act,norm"."""
        return " ".join(f"{flag} {text}" for flag, text in self.flags.items())

    def only(self, *names: str) -> "LayoutRequest":
        """Return the pins of only these fields."""
        return self.without(name for name in self.pinned if name not in names)

    def without(self, names: Iterable[str]) -> "LayoutRequest":
        """Return the pins except those of these fields."""
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
    """A training on a number of ranks; raises InputError for a wrong size or another routing.

    Args:
        global_batch: sequences of a step.
        length: tokens of a sequence.
        dtype: dtype of GEMMs; with 8 bits attention's core, the router and the head are bfloat16.
        routing: loads of experts, in all layers or in each; a step waits for the fullest rank.
        optimizer: name of the optimizer, which gives its bytes for each parameter.
        leaves_room: whether memory has room for natural routing as well as balanced.
        tuning: which parameters of the model train.
        packing: packing of documents into sequences; None for a single document in each.
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
        """Length of an unpacked sequence with the same attention per token."""
        return self.length if self.packing is None else max(1, round(self.packing.attended))

    @property
    def element(self) -> TrainingDtype:
        """The dtype of all tensors that are not in 8 bits or fewer."""
        return self.dtype if self.dtype in HALF_PRECISION else "bfloat16"

    @property
    def with_mean_layers(self) -> "TrainingJob":
        """The job without records of each layer: every layer is as full as the mean layer."""
        return replace(self, decoder=self.decoder.with_records(repeat(None)))

    def skew(self, part: RoutedExperts, ep: int) -> RankSkew:
        """Return how full the fullest of `ep` ranks is in a layer."""
        if isinstance(self.routing, RecordedLayers):
            return self.routing.skew(part.record, ep)
        fullest = self.routing.skew(part.num_experts, part.mean_top_k, ep)
        if self.routing == NATURAL:
            return RankSkew(mean=1 + _MEAN_OF_NATURAL * (fullest - 1), p99=fullest)
        return RankSkew(mean=fullest, p99=fullest)

    def micro_batches(self, layout: FoldedLayout) -> int:
        """Return the number of micro-batches of a replica in a step."""
        return self.global_batch // (layout.micro_batch * layout.dp)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.length


def read_dtype(dtype: str) -> TrainingDtype:
    """Return the name of a training's dtype; raises InputError for another name."""
    if dtype not in TRAINING_DTYPES:
        what, hint = f"--dtype {dtype!r} is not for whole models", ", ".join(TRAINING_DTYPES)
        raise InputError(what, f"use {hint}", field="dtype")
    return dtype
