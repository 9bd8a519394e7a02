"""A caller's pins and bounds on a plan: typed values, and the texts that plan files carry.

Flags, JSON and forms all become a mapping of texts by flag name, which `Constraints.decode` reads
and `Constraints.encode` writes; `inputs.constraints` of a plan file is that mapping.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from moetune.domain.document import shown
from moetune.domain.errors import InputError, check_positive
from moetune.domain.layer import ExpertParallel, LayerShape, Phase
from moetune.domain.layout import AXES, Layout
from moetune.domain.model import Transformer, find_model
from moetune.domain.quantization import Quantization
from moetune.domain.routing import LayerRouting
from moetune.domain.spelling import AS_FLAGS, AS_KEYS, Spelling, check_range, nearest_or
from moetune.domain.training import Overlap

Order = Literal["dispatch_first", "interleaved"]
Dispatcher = Literal["flat", "hierarchical"]
"""Ways of rows to their experts: to all ranks at once, or across nodes and then inside them."""
DISPATCHERS: tuple[Dispatcher, ...] = get_args(Dispatcher)
_NOT_RUN: Mapping[str, str] = MappingProxyType(
    {
        "symmetric_memory": "torch's all_to_all_vdev_2d has not been run with this runtime, and "
        "writes what arrives into a buffer of fixed size without comparing the two",
        "deep_ep": "DeepEP has not been run with this runtime, and adds up results itself, in "
        "bfloat16, so that numbers would differ from the other dispatchers'",
    }
)
"""Dispatchers of others, and why they are refused: decision 0068."""
Strategy = Literal["none", "S1", "S2", "S3", "S4"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
PlacementRule = Literal["planned", "once", "natural"]
MAX_DEGREE = 64
MOE_EVERY = 2
EXPERT_PARALLEL = "expert-parallel"
SEQUENCE_PARALLEL = "sequence-parallel"
MEMORY_TAKEN = "memory-taken"
ALLOW_MODELLED = "allow-modelled"
QUANTIZATION = "quantization"
ROUTING = "routing"
EXPERT_PLACEMENT = "expert-placement"
NO_OFFLOAD = "no-offload"


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
    dispatcher: Dispatcher | None = None

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPins:
    """Pins of a layout; None for what the solver chooses.

    Args:
        micro_batch: sequences of a micro-batch.
        offload: True where model states have to live on the host, False where they may not.
        overlap: "batch": two micro-batches take turns; "chunks": one at a time; "none": one at a
            time, and its exchanges in one chunk.

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
        takes_turns = layout.tp == layout.pp == 1 < layout.ep
        return (
            (kind is None or layout.expert_parallel == kind)
            and (self.overlap != "batch" or takes_turns)
            and all(getattr(self, axis) in (None, getattr(layout, axis)) for axis in AXES)
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
                name = spelling(next(_flags_of("sizes", self.given)))
                raise InputError(f"{name} is for a whole model, and {model} is one layer")
            return replace(own, moe=own.moe, **self.given) if own else None
        if not self.given:
            return None
        needed = ("num_layers", "num_heads", "length", "vocab_size")
        missing = _flags_of("sizes", [name for name in needed if name not in self.given])
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
        quantization: text of a layer's `Quantization`; "" for none.
        routing: text of a `LayerRouting`; "" for balanced.
        expert_placement: "planned" by the loads of the routing, likewise with each expert "once",
            without replicas, or the "natural" order.
    """

    bounds: Bounds = field(default_factory=Bounds)
    pins: LayoutPins = field(default_factory=LayoutPins)
    sizes: TransformerSizes = field(default_factory=TransformerSizes)
    sequence_parallel: bool = False
    memory_taken_bytes: int = 0
    allow_modelled: bool = False
    quantization: str = ""
    routing: str = ""
    expert_placement: PlacementRule = "planned"

    def encode(self) -> dict[str, str]:
        """Return what differs from the defaults, as texts by flag name."""
        default = Constraints()
        texts = {
            flag: _text(value)
            for flag, value in _values(self)
            if value != dict(_values(default))[flag]
        }
        if self.pins.offload is False:
            del texts["offload"]
            texts[NO_OFFLOAD] = "true"
        return texts

    @classmethod
    def decode(cls, texts: Mapping[str, str], spelling: Spelling = AS_KEYS) -> "Constraints":
        """Return the constraints in texts by flag name.

        Raises:
            InputError: a name is unknown, or a value wrong; the text names it.
        """
        parts: dict[str, dict[str, Any]] = {part: {} for part in ("bounds", "pins", "sizes", "")}
        for flag, text in sorted(texts.items(), key=lambda item: item[0] == NO_OFFLOAD):
            if flag not in _PLACES:
                raise _unknown(flag, spelling)
            part, name = _PLACES[flag]
            value = _value(flag, text, spelling)
            if flag != NO_OFFLOAD:
                parts[part][name] = value
            elif value and parts[part].setdefault(name, False):
                raise InputError(f"{spelling(NO_OFFLOAD)} contradicts {spelling('offload')}")
        return cls(
            bounds=Bounds(**parts["bounds"]),
            pins=LayoutPins(**parts["pins"]),
            sizes=TransformerSizes(**parts["sizes"]),
            **parts[""],
        )

    @classmethod
    def recorded(cls, texts: Mapping[str, str]) -> "Constraints":
        """Return the constraints of a plan file, without those of a newer moetune."""
        return cls.decode({flag: text for flag, text in texts.items() if flag in _PLACES})

    def check_sizes(self, spelling: Spelling = AS_KEYS) -> None:
        """Raise InputError where a number is so large that it is a mistake."""
        for flag, value in _values(self):
            limits = _NUMBERS.get(flag)
            if limits is not None and value is not None:
                check_range(spelling(flag), value, *limits)


_Part = Literal["bounds", "pins", "sizes", ""]
_PLACES: Mapping[str, tuple[_Part, str]] = MappingProxyType(
    {
        "forward-degree": ("bounds", "forward_degree"),
        "backward-degree": ("bounds", "backward_degree"),
        "max-degree": ("bounds", "max_degree"),
        "min-chunk-tokens": ("bounds", "min_chunk_tokens"),
        "order": ("bounds", "order"),
        "strategy": ("bounds", "strategy"),
        "dispatcher": ("bounds", "dispatcher"),
        "num-layers": ("sizes", "num_layers"),
        "num-heads": ("sizes", "num_heads"),
        "seq": ("sizes", "length"),
        "vocab": ("sizes", "vocab_size"),
        "moe-every": ("sizes", "moe_every"),
        "dp": ("pins", "dp"),
        "ep": ("pins", "ep"),
        "tp": ("pins", "tp"),
        "pp": ("pins", "pp"),
        EXPERT_PARALLEL: ("pins", "expert_parallel"),
        "micro-batch": ("pins", "micro_batch"),
        "zero": ("pins", "zero"),
        "offload": ("pins", "offload"),
        NO_OFFLOAD: ("pins", "offload"),
        "overlap": ("pins", "overlap"),
        SEQUENCE_PARALLEL: ("", "sequence_parallel"),
        MEMORY_TAKEN: ("", "memory_taken_bytes"),
        ALLOW_MODELLED: ("", "allow_modelled"),
        QUANTIZATION: ("", "quantization"),
        ROUTING: ("", "routing"),
        EXPERT_PLACEMENT: ("", "expert_placement"),
    }
)
"""Where each flag's value lies in `Constraints`: the part, and its field."""
_NUMBERS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "forward-degree": (1, 256), "backward-degree": (1, 256), "max-degree": (1, 256),
        "min-chunk-tokens": (1, 2**31),
        "num-layers": (1, 1024), "num-heads": (1, 4096), "seq": (1, 2**24), "vocab": (1, 2**24),
        "moe-every": (0, 1024),
        "dp": (1, 2**20), "ep": (1, 2**20), "tp": (1, 2**20), "pp": (1, 2**20),
        "micro-batch": (1, 2**20),
        MEMORY_TAKEN: (0, 2**50),
    }
)  # fmt: skip
"""Smallest and largest value of the flags with a number."""
_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "order": get_args(Order),
        "strategy": STRATEGIES,
        "overlap": get_args(Overlap),
        EXPERT_PARALLEL: get_args(ExpertParallel),
        EXPERT_PLACEMENT: get_args(PlacementRule),
    }
)
_MOST_DIGITS = 18


def _values(constraints: Constraints) -> Iterator[tuple[str, Any]]:
    for flag, (part, name) in _PLACES.items():
        if flag != NO_OFFLOAD:
            yield flag, getattr(getattr(constraints, part) if part else constraints, name)


def _flags_of(part: _Part, names: Mapping[str, int] | list[str]) -> Iterator[str]:
    return (flag for flag, (where, name) in _PLACES.items() if where == part and name in names)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(flag: str, text: str, spelling: Spelling) -> int | bool | str:
    if flag == "dispatcher":
        return parse_dispatcher(text, spelling)
    if flag == QUANTIZATION:
        return parse_quantization(text)
    if flag == ROUTING:
        return str(LayerRouting.of(text))
    if flag in _CHOICES:
        if text not in _CHOICES[flag]:
            known = ", ".join(_CHOICES[flag])
            raise InputError(f"{spelling(flag)} must be one of {known}, got {shown(text)}")
        return text
    if flag not in _NUMBERS:
        if text not in {"true", "false"}:
            raise InputError(f'{spelling(flag)} must be "true" or "false", got {shown(text)}')
        return text == "true"
    smallest, largest = _NUMBERS[flag]
    is_number = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
    if not is_number or int(text) < smallest:
        raise InputError(
            f"{spelling(flag)} must be a whole number from {smallest} to {largest}, as a text, "
            f"got {shown(text)}"
        )
    return int(text)


def parse_dispatcher(text: str, spelling: Spelling = AS_FLAGS) -> Dispatcher:
    """Return the dispatcher of that name.

    Raises:
        InputError: there is none, or it is one that others have and this runtime does not run.
    """
    for known in DISPATCHERS:
        if text == known:
            return known
    if text in _NOT_RUN:
        raise InputError(
            f"{spelling('dispatcher')} {text} is not supported: {_NOT_RUN[text]}",
            f"take {' or '.join(DISPATCHERS)}, or omit it for the faster of those measured",
        )
    names = ", ".join(DISPATCHERS)
    raise InputError(f"{spelling('dispatcher')} must be one of {names}, got {shown(text)}")


def parse_quantization(text: str) -> str:
    """Return the shortest text of a layer's quantization; "" for none.

    Raises:
        InputError: there is no such format.
    """
    return str(Quantization.of(text) or "")


def _unknown(flag: str, spelling: Spelling) -> InputError:
    hint = nearest_or(f"known: {', '.join(sorted(_PLACES))}", flag, _PLACES)
    return InputError(f"{spelling.constraint.format(shown(flag))} is unknown", hint)


def constraint_words(flag: str, text: str) -> str:
    """Return a constraint's value for readers: of recorded loads only how many there are."""
    if flag != ROUTING:
        return text
    loads = LayerRouting.of(text).loads
    return loads.name if loads.loads is None else f"loads of {len(loads.loads)} experts"
