"""Parameters that train: all, all except frozen parts, or only low-rank adapters.

LoRA (Hu et al., 2021) adds B·A to a frozen matrix: A (rank, inputs) and B (outputs, rank) train. In
QLoRA (Dettmers et al., 2023) the frozen matrices are NF4 in blocks of 64. Their scales are in 8
bits in blocks of 256 (double quantization; bitsandbytes, `functional.py`, `quantize_4bit`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast, get_args

from moetune.domain.attention import GroupedQueryAttention, LatentAttention
from moetune.domain.document import UNLESS_DEFAULT
from moetune.domain.errors import InputError, check_positive
from moetune.domain.experts import Amounts, DenseFfn, RoutedExperts
from moetune.domain.recurrent import GatedDeltaNet
from moetune.domain.spelling import nearest_or

AdaptedParts = Literal["attention", "experts", "all"]
"""Matrices with adapters: the mixers' projections, routed experts, or both and all other FFNs."""
ExpertAdapters = Literal["each", "shared"]
"""Whether each expert has adapters, or the experts of a rank share the adapters of an expert."""
BaseFormat = Literal["bfloat16", "nf4"]
"""Formats of frozen matrices."""
ModelPart = Literal[
    "embedding", "attention", "dense", "router", "experts", "shared_experts", "norms", "head"
]
MODEL_PARTS: tuple[ModelPart, ...] = get_args(ModelPart)
_AMOUNTS = {"experts": "routed", "shared_experts": "shared"}
"""Parts with another name in `Amounts`."""
_OF_BLOCKS = frozenset({"attention", "dense", "router", "experts", "shared_experts", "norms"})
NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a parameter: 4 bits, a 1-byte scale for 64, and 4 bytes for 256 of the scales."""
_USES = "use all, lora:rank=16, lora:rank=16,targets=attention or qlora:rank=16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Low-rank adapters of frozen matrices; raises InputError for a rank below 1."""

    rank: int
    targets: AdaptedParts = "all"
    experts: ExpertAdapters = "each"

    def __post_init__(self) -> None:
        check_positive(self, "rank")

    def adapts(self, part: object) -> bool:
        """Return whether matrices of a part have adapters."""
        if self.targets == "all":
            return True
        if self.targets == "experts":
            return isinstance(part, RoutedExperts)
        return not isinstance(part, DenseFfn | RoutedExperts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The parameters that train, by default all; raises InputError on a contradiction.

    Args:
        adapters: the adapters, which then are all that trains; None without adapters.
        frozen: parts that do not train; only without adapters.
        base: format of the frozen matrices under the adapters.
    """

    adapters: Adapters | None = None
    frozen: tuple[ModelPart, ...] = field(default=(), metadata=UNLESS_DEFAULT)
    base: BaseFormat = field(default="bfloat16", metadata=UNLESS_DEFAULT)

    def __post_init__(self) -> None:
        if self.adapters is not None and self.frozen:
            raise InputError(
                f"--freeze {','.join(self.frozen)} with adapters, which freeze all parts",
                "omit --freeze", field="freeze",
            )  # fmt: skip
        if self.adapters is None and self.base != "bfloat16":
            raise InputError(f"a base in {self.base} trains by adapters alone", _USES)
        if {*self.frozen} >= _OF_BLOCKS:
            raise InputError(
                "no block trains: the backward pass of the head alone is not planned",
                f"leave some of {', '.join(sorted(_OF_BLOCKS))} to train", field="freeze",
            )  # fmt: skip

    @property
    def trains_all(self) -> bool:
        """Whether all parameters train."""
        return self.adapters is None and not self.frozen

    def trains(self, part: ModelPart) -> bool:
        """Return whether the parameters of a part train, not only adapters of them."""
        return self.adapters is None and part not in self.frozen

    def adapter(self, part: object) -> Adapters | None:
        """Return the adapters of a part's matrices; None if it has none."""
        adapters = self.adapters
        return adapters if adapters is not None and adapters.adapts(part) else None

    def trained(self, amounts: Amounts) -> Amounts:
        """Return the model's parameters that train, by part, without adapters."""
        if self.trains_all:
            return amounts
        names = {part: _AMOUNTS.get(part, part) for part in MODEL_PARTS}
        return Amounts(
            **{name: getattr(amounts, name) * self.trains(part) for part, name in names.items()}
        )

    @property
    def flags(self) -> dict[str, str]:
        """The tuning as `train` and `freeze` of a question; empty if all parameters train."""
        if self.frozen:
            return {"freeze": ",".join(self.frozen)}
        return {} if self.adapters is None else {"train": self.words}

    @property
    def words(self) -> str:
        """Parameters that train, as in `--train`: "lora:rank=16,targets=attention"."""
        if self.adapters is None:
            return f"all but {', '.join(self.frozen)}" if self.frozen else "all"
        kind = "lora" if self.base == "bfloat16" else "qlora"
        adapters = self.adapters
        words = f"{kind}:rank={adapters.rank},targets={adapters.targets}"
        return words if adapters.targets == "attention" else f"{words},experts={adapters.experts}"


TRAINS_ALL = Tuning()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Number of parameters that train, and their share of all parameters with adapters."""

    parameters: int
    share: float


def read_tuning(text: str | None, freeze: str | None, *, experts: ExpertAdapters) -> Tuning:
    """Return the tuning of `--train` and `--freeze`; raises InputError for wrong texts."""
    kind, _, rest = (text or "all").partition(":")
    if kind not in ("all", "lora", "qlora") or (kind == "all" and rest):
        raise InputError(f"--train {text}: unknown", _USES, field="train")
    frozen = _parts(freeze)
    if kind == "all":
        return Tuning(frozen=frozen)
    values: dict[str, str] = {"targets": "all", "experts": experts}
    for word in filter(None, rest.split(",")):
        name, _, value = word.partition("=")
        if name not in ("rank", "targets", "experts"):
            hint = nearest_or(_USES, name, ("rank", "targets", "experts"))
            raise InputError(f"--train {text}: {name!r} is unknown", hint, field="train")
        values[name] = value
    return Tuning(
        adapters=_adapters(values, text or ""), frozen=frozen,
        base="bfloat16" if kind == "lora" else "nf4",
    )  # fmt: skip


def _adapters(values: dict[str, str], text: str) -> Adapters:
    able = {"targets": get_args(AdaptedParts), "experts": get_args(ExpertAdapters)}
    for name, choices in able.items():
        if values[name] not in choices:
            what = f"--train {text}: {name} must be one of {', '.join(choices)}"
            raise InputError(what, _USES, field="train")
    rank = values.get("rank", "")
    if not rank.isdecimal() or not int(rank):
        raise InputError(f"--train {text}: gives no rank of the adapters", _USES, field="train")
    targets = cast("AdaptedParts", values["targets"])
    experts = cast("ExpertAdapters", "each" if targets == "attention" else values["experts"])
    return Adapters(rank=int(rank), targets=targets, experts=experts)


def _parts(text: str | None) -> tuple[ModelPart, ...]:
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    for name in names:
        if name not in MODEL_PARTS:
            hint = nearest_or(f"use some of {', '.join(MODEL_PARTS)}", name, MODEL_PARTS)
            raise InputError(f"--freeze {text}: {name!r} is no part", hint, field="freeze")
    return tuple(part for part in MODEL_PARTS if part in names)


class Matrix(NamedTuple):
    """A matrix with an adapter; `is_cut` if tensor ranks share it."""

    d_in: int
    d_out: int
    is_cut: bool = True

    def parameters(self, rank: int) -> int:
        """Return the number of parameters of A and B."""
        return rank * (self.d_in + self.d_out)


def has_matrices(part: object, *, fuses: bool) -> bool:
    """Return whether the matrices of a part that have adapters are known."""
    if isinstance(part, GatedDeltaNet):
        return fuses and not part.gate_rank
    return isinstance(part, GroupedQueryAttention | LatentAttention | DenseFfn | RoutedExperts)


def adapted_matrices(part: object, *, fuses: bool) -> Iterator[Matrix]:
    """Yield the matrices of a part that have adapters; for routed experts those of one expert.

    Megatron-Core fuses queries, keys and values (`linear_qkv`), and gate and up (`linear_fc1`).
    transformers has separate matrices, except the fused matrices of routed experts.

    Args:
        fuses: whether matrices are fused as in Megatron-Core.
    """
    if isinstance(part, RoutedExperts):
        yield Matrix(part.d_expert, (part.num_gemms - 1) * part.d_hidden)
        yield Matrix(part.d_hidden, part.d_expert)
    elif isinstance(part, DenseFfn):
        ups = part.num_gemms - 1
        up, count = (ups * part.d_hidden, 1) if fuses else (part.d_hidden, ups)
        yield from (Matrix(part.d_model, up),) * count
        yield Matrix(part.d_hidden, part.d_model)
    elif isinstance(part, LatentAttention):
        yield from _latent_matrices(part)
    elif isinstance(part, GatedDeltaNet):
        inner = sum(part.widths.values()) - part.widths["output"] + part.num_head_gates
        yield Matrix(part.d_model, inner)
        yield Matrix(part.widths["output"], part.d_model)
    elif isinstance(part, GroupedQueryAttention):
        widths = dict(part.widths)
        output = widths.pop("output")
        if not fuses:  # in gated attention queries and gates are one matrix
            widths = {**widths, "q": widths["q"] + widths.pop("gate")}
        outputs = (sum(widths.values()),) if fuses else filter(None, widths.values())
        yield from (Matrix(part.d_model, width) for width in outputs)
        yield Matrix(output, part.d_model)


def _latent_matrices(part: LatentAttention) -> Iterator[Matrix]:
    widths = part.widths
    if part.q_rank:
        yield Matrix(part.d_model, part.q_rank, is_cut=False)
    yield Matrix(part.q_rank or part.d_model, widths["q"])
    yield Matrix(part.d_model, widths["kv_latent"], is_cut=False)
    yield Matrix(part.kv_rank, part.num_heads * (part.nope_dim + part.v_head_dim))
    yield Matrix(widths["output"], part.d_model)
