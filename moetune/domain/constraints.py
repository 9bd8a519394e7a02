"""A caller's pins and bounds on a plan: see `domain.constraint_texts` for how they are written."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Literal, get_args

from moetune.domain.errors import InfeasiblePlanError, InputError, check_positive
from moetune.domain.layer import PHASES, ExpertParallel, LayerShape, Phase
from moetune.domain.layout import AXES, Layout
from moetune.domain.model import Transformer, find_model
from moetune.domain.placement import PlacementRule
from moetune.domain.spelling import AS_FLAGS, Spelling
from moetune.domain.training import Overlap

Order = Literal["dispatch_first", "interleaved"]
Strategy = Literal["none", "S1", "S2", "S3", "S4"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
OFFLOADS_INPUT: frozenset[Strategy] = frozenset({"S1", "S3"})
"""The experts' inputs go to host memory; S2 and S4 send them again (MPipeMoE Table II)."""
OFFLOADS_MIDDLE: frozenset[Strategy] = frozenset({"S1", "S2"})
"""Pre-activations go to host memory; S3 and S4 compute them again."""
MAX_DEGREE = 64
MOE_EVERY = 2
SIZE_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "num_layers": "num-layers",
        "num_heads": "num-heads",
        "length": "seq",
        "vocab_size": "vocab",
        "moe_every": "moe-every",
    }
)
"""Flag of each size of a whole model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds and pins (not None) of a layer's chunks and memory.

    Raises:
        InputError: a degree or a size below 1.
    """

    forward_degree: int | None = None
    backward_degree: int | None = None
    max_degree: int = MAX_DEGREE
    min_chunk_tokens: int = 1
    order: Order | None = None
    strategy: Strategy | None = None

    def __post_init__(self) -> None:
        check_positive(self, "forward_degree", "backward_degree", "max_degree", "min_chunk_tokens")

    @property
    def chosen_order(self) -> Order:
        """The order pinned, or dispatch first: no order of the chunks is faster."""
        return self.order or "dispatch_first"

    def pinned(self, phase: Phase) -> int | None:
        """Return the degree pinned for the phase."""
        return self.forward_degree if phase == "forward" else self.backward_degree

    def largest(self, tokens: int) -> int:
        """Return the largest degree allowed; one chunk always is, however small."""
        return max(1, min(self.max_degree, tokens // self.min_chunk_tokens))

    def check_degrees(self, tokens: int) -> None:
        """Raise InfeasiblePlanError where so many tokens do not allow a pinned degree."""
        largest = self.largest(tokens)
        for phase in PHASES:
            pinned = self.pinned(phase)
            if pinned is None or pinned <= largest:
                continue
            what = f"{phase}_degree {pinned} is infeasible: "
            flag = f"--{phase}-degree"
            if pinned > self.max_degree:
                raise InfeasiblePlanError(
                    f"{what}max_degree is {self.max_degree}",
                    f"nearest: {flag} {largest}, or allow more with --max-degree {pinned}",
                )
            raise InfeasiblePlanError(
                f"{what}{tokens} tokens per rank in chunks of at least {self.min_chunk_tokens} "
                f"make at most {largest}",
                f"nearest: {flag} {largest}, or {pinned * self.min_chunk_tokens} tokens",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPins:
    """Pins of a layout; None for what the solver chooses.

    Args:
        micro_batch: sequences of a micro-batch.
        offload: True where model states have to live on the host, False where they may not.
        overlap: "chunks": of exchanges with the experts of other chunks; "none": in one chunk.

    Raises:
        InputError: a number below 1.
    """

    dp: int | None = None
    ep: int | None = None
    tp: int | None = None
    pp: int | None = None
    expert_parallel: ExpertParallel | None = None
    micro_batch: int | None = None
    zero: bool | None = None
    offload: bool | None = None
    overlap: Overlap | None = None

    def __post_init__(self) -> None:
        check_positive(self, *AXES, "micro_batch")

    def allow(self, layout: Layout) -> bool:
        """Return whether the layout is as pinned."""
        kind = self.expert_parallel
        return (kind is None or layout.expert_parallel == kind) and all(
            getattr(self, axis) in (None, getattr(layout, axis)) for axis in AXES
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerSizes:
    """Sizes of a whole model around its MoE layer; None for the named model's own."""

    num_layers: int | None = None
    num_heads: int | None = None
    length: int | None = None
    vocab_size: int | None = None
    moe_every: int | None = None

    @classmethod
    def of(cls, whole: Transformer) -> "TransformerSizes":
        """Return all sizes of a whole model."""
        return cls(**{item.name: getattr(whole, item.name) for item in fields(cls)})

    @property
    def given(self) -> dict[str, int]:
        """The sizes that are not None."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def transformer(
        self, *, model: str | None, layer: LayerShape | None, spelling: Spelling = AS_FLAGS
    ) -> Transformer | None:
        """Return the whole model of these sizes; None for one layer.

        Args:
            model: named model, which gives the sizes that are None.
            layer: MoE layer, where no model is named.

        Raises:
            InputError: sizes are missing, or the named model is one layer.
        """
        if model is not None:
            own = find_model(model).transformer
            if own is None and self.given:
                name = spelling(SIZE_FLAGS[next(iter(self.given))])
                raise InputError(f"{name} is for a whole model, and {model} is one layer")
            return replace(own, moe=own.moe, **self.given) if own else None
        if not self.given:
            return None
        needed = ("num_layers", "num_heads", "length", "vocab_size")
        missing = [SIZE_FLAGS[name] for name in needed if name not in self.given]
        lacks = [spelling(flag) for flag in missing] or ([] if layer else [spelling("layer")])
        if layer is None or lacks:
            raise InputError(
                f"a whole model lacks {', '.join(lacks)}",
                f"or name one with {spelling('model')}, such as ppmoe-6.7b",
            )
        return Transformer(moe=layer, **{"moe_every": MOE_EVERY, **self.given})

    def changed_from(self, own: Transformer | None) -> "TransformerSizes":
        """Return the sizes that differ from a named model's own, or from the defaults."""
        default = {"moe_every": MOE_EVERY} if own is None else {}
        changed = {
            name: value
            for name, value in self.given.items()
            if value != (getattr(own, name) if own else default.get(name))
        }
        return TransformerSizes(**changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Everything that a caller pins or bounds.

    Args:
        sequence_parallel: ranks of a tensor-parallel group have a shard of the tokens each.
        memory_taken_bytes: part of the memory limit that the rest of the model takes.
        allow_modelled: accept estimates for what was not measured.
        routing: text of a `LayerRouting`; "" for balanced.
        expert_placement: "planned" by the loads of the routing, or the "natural" order.
    """

    bounds: Bounds = field(default_factory=Bounds)
    pins: LayoutPins = field(default_factory=LayoutPins)
    sizes: TransformerSizes = field(default_factory=TransformerSizes)
    sequence_parallel: bool = False
    memory_taken_bytes: int = 0
    allow_modelled: bool = False
    routing: str = ""
    expert_placement: PlacementRule = "planned"
