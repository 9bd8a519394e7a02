"""A decoder as blocks of attention, dense FFNs and routed experts: sizes, FLOPs, and equal blocks.

Training FLOPs of a token are as in Megatron-LM's TFLOP/s: three times the forward GEMMs (forward,
gradients of inputs and of weights). A multiply-accumulate is two operations. They count half of a
causal mask, and multi-token prediction with separate logits. They count no router, norm, activation
function or recomputation.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias, TypeVar

from moetune.domain.attention import CompressedAttention, GroupedQueryAttention, LatentAttention
from moetune.domain.errors import check_positive
from moetune.domain.experts import Amounts, DenseFfn, RoutedExperts
from moetune.domain.layer import FORWARD_AND_BACKWARD, OPERATIONS_OF_A_MAC, LayerShape
from moetune.domain.recurrent import GatedDeltaNet, LinearAttention, ShortConvolution, StateSpace

Mixer: TypeAlias = (
    GroupedQueryAttention
    | LatentAttention
    | CompressedAttention
    | GatedDeltaNet
    | StateSpace
    | LinearAttention
    | ShortConvolution
)
Part: TypeAlias = Mixer | DenseFfn | RoutedExperts
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block of a decoder: its parts in order.

    Args:
        norms: parameters of its norms and of the mixing of residual streams.
        streams: residual streams (hyper-connections have several).
    """

    parts: tuple[Part, ...]
    norms: int
    streams: int = 1

    @property
    def routed(self) -> RoutedExperts | None:
        """Routed experts of the block; None if it has none."""
        return next((part for part in self.parts if isinstance(part, RoutedExperts)), None)

    def with_record(self, record: int | None) -> "Block":
        """Return the block with the number of its layer in a routing record; None for no record."""
        parts = (
            replace(part, record=record) if isinstance(part, RoutedExperts) else part
            for part in self.parts
        )
        return replace(self, parts=tuple(parts))

    @property
    def modules(self) -> frozenset[str]:
        """Modules that the backward pass may recompute, as Megatron-Core names them.

        "full" is the whole block; "selective" is the part that torchtitan's policy recomputes.
        """
        modules = {"full", "selective", "norm"}
        for part in self.parts:
            if isinstance(part, RoutedExperts):
                modules |= {"moe", "moe_act"}
                if part.shared is not None:
                    modules.add("shared_experts")
            elif isinstance(part, DenseFfn):
                modules.add("mlp")
            else:
                modules.add("core_attn")
            if isinstance(part, LatentAttention):
                modules.add("mla_up_proj")
        return frozenset(modules)

    @property
    def parameters(self) -> Amounts:
        """Parameters by part."""
        return self._parameters(active=False)

    @property
    def active_parameters(self) -> Amounts:
        """Parameters that are active for a token, by part."""
        return self._parameters(active=True)

    def _parameters(self, *, active: bool) -> Amounts:
        amounts = (
            part.parameters(active=active)
            if isinstance(part, RoutedExperts)
            else _amount(part, part.parameters)
            for part in self.parts
        )
        return sum(amounts, Amounts(norms=self.norms))

    def forward_macs(self, length: int) -> Amounts:
        """Return the MACs of one token's forward pass in a sequence of `length` tokens, by part."""
        amounts = (
            part.forward_macs()
            if isinstance(part, RoutedExperts)
            else _amount(part, part.forward_macs(length))
            for part in self.parts
        )
        return sum(amounts, Amounts())

    def flops_per_token(self, length: int) -> Amounts:
        """Return the training FLOPs of one token, by part."""
        return self.forward_macs(length).times(OPERATIONS_OF_A_MAC * FORWARD_AND_BACKWARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One step of multi-token prediction: blocks after the decoder, with separate logits.

    Args:
        projection: parameters of the projection that joins hidden state and next embedding.
    """

    blocks: tuple[Block, ...]
    projection: int
    norms: int

    @property
    def parameters(self) -> int:
        """Number of parameters, without the embedding and head, which the decoder shares."""
        blocks = sum(int(block.parameters.total) for block in self.blocks)
        return self.projection + self.norms + blocks


@dataclass(frozen=True)
class Decoder:
    """A decoder-only language model; raises InputError for a size below 1.

    Args:
        norms: parameters of the last norm and of the joining of residual streams.
        is_tied: whether the head's matrix is the embedding's.
        embedding_extra: parameters next to the token embedding, such as positions.
        tables: parameters of further embedding tables; a token reads only a few rows of them.
        uncounted: towers next to the language model, such as "vision", which are not counted.
        path: absolute path of the configuration, "" for a model that is known by its name.
    """

    name: str
    family: str
    d_model: int
    vocab_size: int
    blocks: tuple[Block, ...]
    norms: int
    is_tied: bool = False
    embedding_extra: int = 0
    tables: int = field(default=0, repr=False)
    head_biases: int = 0
    predictions: tuple[Prediction, ...] = ()
    uncounted: tuple[str, ...] = field(default=(), repr=False)
    path: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        check_positive(self, "d_model", "vocab_size", "num_layers")

    def with_records(self, records: Iterable[int | None]) -> "Decoder":
        """Return the model with a record's number for each block with routed experts."""
        numbers = iter(records)
        blocks = (
            block if block.routed is None else block.with_record(next(numbers))
            for block in self.blocks
        )
        return replace(self, blocks=tuple(blocks))

    @property
    def num_layers(self) -> int:
        """Number of blocks, without those of multi-token prediction."""
        return len(self.blocks)

    @cached_property
    def identity(self) -> str:
        """Text of the sizes, for digests; stored plans keep the digest that they have.

        `repr` has the fields of the first version; later fields are added only where set.
        """
        scorers = (
            mixer.indexer for mixer in self.mixers if isinstance(mixer, GroupedQueryAttention)
        )
        later = [repr(scorer) for scorer in scorers if scorer is not None]
        return " ".join([repr(self), *later, *([str(self.tables)] if self.tables else [])])

    @cached_property
    def num_moe_layers(self) -> int:
        """Number of blocks with routed experts."""
        return sum(block.routed is not None for block in self.blocks)

    @cached_property
    def has_other_ffns(self) -> bool:
        """Whether any block has a dense FFN or shared experts."""
        parts = [part for kind in self.kinds for part in kind.parts]
        return any(isinstance(part, DenseFfn) or getattr(part, "shared", None) for part in parts)

    @cached_property
    def kinds(self) -> tuple[Block, ...]:
        """Distinct blocks in the order of their first appearance."""
        return tuple(dict.fromkeys(self.blocks))

    @cached_property
    def kind_of_block(self) -> tuple[int, ...]:
        """Index in `kinds` of each block."""
        numbers = {kind: number for number, kind in enumerate(self.kinds)}
        return tuple(numbers[block] for block in self.blocks)

    @cached_property
    def routed_kinds(self) -> tuple[RoutedExperts | None, ...]:
        """Routed experts of each of `kinds`; None for a block without any."""
        return tuple(kind.routed for kind in self.kinds)

    @cached_property
    def kinds_and_predictions(self) -> tuple[Block, ...]:
        """Kinds of the decoder's blocks, and then each block of multi-token prediction."""
        return *self.kinds, *(
            block for prediction in self.predictions for block in prediction.blocks
        )

    @cached_property
    def head_counts(self) -> tuple[int, ...]:
        """Distinct numbers of heads of its mixers."""
        return _distinct(getattr(mixer, "num_heads", None) for mixer in self.mixers)

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """Distinct mixers of its blocks, in the order of their first appearance."""
        parts = (part for kind in self.kinds for part in kind.parts)
        return _distinct(part for part in parts if not isinstance(part, DenseFfn | RoutedExperts))

    @cached_property
    def kv_head_counts(self) -> tuple[int, ...]:
        """Distinct numbers of key-value heads of its mixers; latent attention has none."""
        return _distinct(map(_kv_heads, self.mixers))

    @cached_property
    def mamba_groups(self) -> tuple[int, ...]:
        """Distinct numbers of groups that share B and C in its Mamba-2 mixers; () without any."""
        mixers = (mixer for mixer in self.mixers if isinstance(mixer, StateSpace))
        return _distinct(mixer.num_groups for mixer in mixers if not mixer.rank)

    @cached_property
    def delta_heads(self) -> tuple[tuple[int, int], ...]:
        """Distinct numbers of key heads and of value heads of its gated delta nets."""
        mixers = (mixer for mixer in self.mixers if isinstance(mixer, GatedDeltaNet))
        return _distinct((mixer.num_key_heads, mixer.num_value_heads) for mixer in mixers)

    @cached_property
    def has_mamba(self) -> bool:
        """Whether any block is a state space: the model is Mamba, or a hybrid with attention."""
        return any(isinstance(mixer, StateSpace) for mixer in self.mixers)

    @cached_property
    def stage_starts(self) -> tuple[int, ...]:
        """Blocks that a stage may begin with: those that read no earlier block's selected keys."""
        return tuple(
            number for number, block in enumerate(self.blocks)
            if all(getattr(part, "top_keys", None) is None for part in block.parts)
        )  # fmt: skip

    @cached_property
    def modules(self) -> frozenset[str]:
        """Modules of any of its blocks (`Block.modules`)."""
        return frozenset().union(*(kind.modules for kind in self.kinds))

    @cached_property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """Runs of equal blocks: first block, number of blocks, index in `kinds`."""
        runs: list[tuple[int, int, int]] = []
        for number, kind in enumerate(self.kind_of_block):
            if runs and runs[-1][2] == kind:
                first, count, _ = runs[-1]
                runs[-1] = (first, count + 1, kind)
            else:
                runs.append((number, 1, kind))
        return tuple(runs)

    @cached_property
    def layer(self) -> LayerShape:
        """The MoE layer that most blocks have; a dense model's FFN as a single expert."""
        kind = RoutedExperts if self.num_moe_layers else DenseFfn
        parts = (part for block in self.blocks for part in block.parts)
        shapes = [part.layer for part in parts if isinstance(part, kind)]
        return max(dict.fromkeys(shapes), key=shapes.count)

    @cached_property
    def parameters(self) -> Amounts:
        """Parameters by part, without multi-token prediction; a tied head has none."""
        blocks = self._parameters(sum((block.parameters for block in self.blocks), Amounts()))
        return blocks + Amounts(embedding=self.tables)

    @cached_property
    def active_parameters(self) -> Amounts:
        """Parameters that are active for a token, by part: all except experts not chosen for it."""
        return self._parameters(sum((block.active_parameters for block in self.blocks), Amounts()))

    def _parameters(self, blocks: Amounts) -> Amounts:
        table = self.vocab_size * self.d_model
        return blocks + Amounts(
            norms=self.norms,
            embedding=table + self.embedding_extra,
            head=(0 if self.is_tied else table) + self.head_biases,
        )

    @property
    def prediction_parameters(self) -> int:
        """Parameters of multi-token prediction."""
        return sum(prediction.parameters for prediction in self.predictions)

    def flops_per_token(self, length: int) -> Amounts:
        """Return the training FLOPs of one token in a sequence of `length` tokens, by part.

        Blocks of multi-token prediction count in their parts, their projections as embedding.
        """
        counts = {kind: self.blocks.count(kind) for kind in self.kinds}
        amounts = [kind.forward_macs(length).times(count) for kind, count in counts.items()]
        head = self.vocab_size * self.d_model
        amounts.append(Amounts(head=head * (1 + len(self.predictions))))
        for prediction in self.predictions:
            amounts += [block.forward_macs(length) for block in prediction.blocks]
            amounts.append(Amounts(embedding=prediction.projection))
        return sum(amounts, Amounts()).times(OPERATIONS_OF_A_MAC * FORWARD_AND_BACKWARD)


def _distinct(values: Iterable[_T | None]) -> tuple[_T, ...]:
    """Return the distinct values except None and 0, in the order of their first appearance."""
    return tuple(dict.fromkeys(value for value in values if value))


def _kv_heads(mixer: Mixer) -> int | None:
    if isinstance(mixer, GroupedQueryAttention | LinearAttention):
        return mixer.num_kv_heads
    return 1 if isinstance(mixer, CompressedAttention) else None


def _amount(part: Mixer | DenseFfn, number: float) -> Amounts:
    return Amounts(dense=number) if isinstance(part, DenseFfn) else Amounts(attention=number)
