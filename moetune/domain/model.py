"""Models of the papers by name: MoE layers, and whole transformers."""

import re
from dataclasses import dataclass
from types import MappingProxyType

from moetune.domain.errors import InputError, check_positive
from moetune.domain.layer import ACTIVATIONS, Activation, LayerShape
from moetune.domain.layout import divisor_words
from moetune.domain.spelling import nearest_then

_LARGEST = {"num_layers": 1024, "num_heads": 4096, "length": 2**24, "vocab_size": 2**24}


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Transformer:
    """A decoder in which every `moe_every`-th block has an MoE layer instead of a dense FFN.

    Args:
        moe: the MoE layer; dense FFNs have the width and activation of one expert. In a dense
            model it has a single expert: the FFN.
        moe_every: 1 for experts in every block, 2 for the 2nd, 4th and so on; 0 for a dense model.

    Raises:
        InputError: a size out of range, heads that do not divide the width, or no experts.
    """

    moe: LayerShape
    num_layers: int
    num_heads: int
    length: int
    vocab_size: int
    moe_every: int = 2

    def __post_init__(self) -> None:
        check_positive(self, "num_layers", "num_heads", "length", "vocab_size")
        for name, most in _LARGEST.items():
            if getattr(self, name) > most:
                raise InputError(f"{name} must be from 1 to {most}, got {getattr(self, name)}")
        if self.moe_every < 0:
            raise InputError(f"moe_every must be at least 0, got {self.moe_every}")
        if self.moe.d_model % self.num_heads:
            raise InputError(
                f"d_model ({self.moe.d_model}) does not divide by num_heads ({self.num_heads})",
                f"use {divisor_words(self.moe.d_model, self.num_heads)} heads",
            )
        if self.moe_every > self.num_layers:
            raise InputError(
                f"moe_every ({self.moe_every}) is larger than num_layers ({self.num_layers}): "
                "no block has experts"
            )
        if self.is_dense and self.moe.num_experts > 1:
            raise InputError(
                f"moe_every is 0, but there are {self.moe.num_experts} experts",
                "use 1 expert for a dense model, or moe_every of at least 1",
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.moe.d_model // self.num_heads

    @property
    def is_dense(self) -> bool:
        """Whether no block has experts."""
        return self.moe_every == 0

    def has_experts(self, block: int) -> bool:
        """Return whether the block, counted from 0, has experts."""
        return not self.is_dense and (block + 1) % self.moe_every == 0

    @property
    def num_moe_layers(self) -> int:
        """Blocks with experts."""
        return 0 if self.is_dense else self.num_layers // self.moe_every

    @property
    def text(self) -> str:
        """The model's name by its sizes and their flags: "num-layers=12,num-heads=16,…"."""
        moe = self.moe
        sizes = (
            self.num_layers, self.num_heads, moe.d_model, moe.d_hidden, moe.num_experts, moe.top_k,
            moe.activation, self.moe_every, self.length, self.vocab_size,
        )  # fmt: skip
        return ",".join(f"{flag}={size}" for flag, size in zip(_FLAGS, sizes, strict=True))


def read_shape(text: str) -> Transformer | None:
    """Return the model of a `Transformer.text`; None for other text. InputError for wrong sizes."""
    match = _SHAPE.fullmatch(text)
    if match is None:
        return None
    *sizes, moe_period, length, vocab = (int(text) for text in match.groups() if text.isdecimal())
    layers, heads, d_model, d_hidden, experts, top_k = sizes
    moe = LayerShape(
        d_model=d_model, d_hidden=d_hidden, num_experts=experts, top_k=top_k,
        activation=next(name for name in ACTIVATIONS if name in match.groups()),
    )  # fmt: skip
    return Transformer(
        moe=moe, num_layers=layers, num_heads=heads, length=length, vocab_size=vocab,
        moe_every=moe_period,
    )  # fmt: skip


_FLAGS = (
    "num-layers", "num-heads", "d-model", "d-hidden", "num-experts", "top-k", "activation",
    "moe-every", "seq", "vocab",
)  # fmt: skip
_SHAPE = re.compile(
    ",".join(
        f"{flag}=({'|'.join(ACTIVATIONS) if flag == 'activation' else '[0-9]{1,9}'})"
        for flag in _FLAGS
    )
)


PADDED_GPT_VOCABULARY = 51_200
"""GPT-2's 50,257 tokens, padded by Megatron-LM to a multiple of 128 for each of 8 tensor ranks.

PPMoE names no vocabulary; it builds on Megatron-LM and GPT-3, whose tokens are GPT-2's.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModel:
    """A named whole model of a paper.

    Args:
        sequences_per_rank: sequences of a step in the source; the default of a request.
    """

    name: str
    title: str
    source: str
    shape: Transformer
    sequences_per_rank: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A named MoE layer.

    Args:
        num_experts: experts of the layer; None where they grow with the ranks.
        tokens_per_rank: tokens of a step in the source; the default of a request.
    """

    name: str
    title: str
    source: str
    d_model: int
    d_hidden: int
    top_k: int
    activation: Activation
    tokens_per_rank: int
    num_experts: int | None = None
    experts_per_rank: int | None = None

    def layer(self, world_size: int) -> LayerShape:
        """Return the MoE layer on `world_size` expert-parallel ranks."""
        experts = self.num_experts or (self.experts_per_rank or 1) * world_size
        return LayerShape(
            d_model=self.d_model,
            d_hidden=self.d_hidden,
            num_experts=experts,
            top_k=self.top_k,
            activation=self.activation,
        )


def _mpipemoe(name: str, title: str, d_model: int, d_hidden: int) -> Model:
    return Model(
        name=name, title=title, source="MPipeMoE, Table III", d_model=d_model, d_hidden=d_hidden,
        num_experts=64, top_k=1, activation="gelu", tokens_per_rank=8192,
    )  # fmt: skip


def _pipemoe(
    name: str, title: str, d_model: int, d_hidden: int, experts_per_rank: int, tokens: int,
    activation: Activation,
) -> Model:  # fmt: skip
    return Model(
        name=name, title=title, source="PipeMoE, Table V", d_model=d_model, d_hidden=d_hidden,
        experts_per_rank=experts_per_rank, top_k=2, activation=activation, tokens_per_rank=tokens,
    )  # fmt: skip


def _ppmoe(name: str, title: str, num_layers: int, d_model: int, num_heads: int) -> WholeModel:
    """Return a model of PPMoE §4.1; the batch is GPT-3's for its backbone (its Table 2.1).

    0.5M tokens on 32 ranks and 2M on 128 are both 8 sequences a rank.
    """
    moe = LayerShape(d_model=d_model, d_hidden=4 * d_model, num_experts=64)
    shape = Transformer(
        moe=moe, num_layers=num_layers, num_heads=num_heads, length=2048,
        vocab_size=PADDED_GPT_VOCABULARY,
    )  # fmt: skip
    return WholeModel(name=name, title=title, source="PPMoE, §4.1", shape=shape)


def _dense(
    name: str, title: str, source: str, num_layers: int, d_model: int, num_heads: int,
    vocab_size: int, activation: Activation = "gelu",
) -> WholeModel:  # fmt: skip
    """Return a dense model; its batch is eight sequences a rank, which fill a device."""
    network = LayerShape(
        d_model=d_model, d_hidden=4 * d_model, num_experts=1, activation=activation
    )
    shape = Transformer(
        moe=network, num_layers=num_layers, num_heads=num_heads, length=2048,
        vocab_size=vocab_size, moe_every=0,
    )  # fmt: skip
    return WholeModel(name=name, title=title, source=source, shape=shape)


MODELS = MappingProxyType(
    {
        model.name: model
        for model in (
            _mpipemoe("gpt-s", "GPT-S MoE", 768, 3072),
            _mpipemoe("gpt-xl", "GPT-XL MoE", 2048, 8192),
            _mpipemoe("bert-l", "BERT-L MoE", 1024, 4096),
            _pipemoe("tm-1", "Transformer MoE, 1 expert a rank", 512, 1024, 1, 4 * 256, "relu"),
            _pipemoe("tm-2", "Transformer MoE, 2 experts a rank", 512, 1024, 2, 4 * 256, "relu"),
            _pipemoe("rm-1", "RoBERTa MoE, 1 expert a rank", 768, 3072, 1, 2 * 64, "gelu"),
            _pipemoe("rm-2", "RoBERTa MoE, 2 experts a rank", 768, 3072, 2, 2 * 64, "gelu"),
        )
    }
)


WHOLE_MODELS = MappingProxyType(
    {
        model.name: model
        for model in (
            _ppmoe("ppmoe-6.7b", "GPT-3 Medium with experts", 24, 1024, 16),
            _ppmoe("ppmoe-143b", "GPT-3 6.7B with experts", 32, 4096, 32),
            _dense(
                "gpt-2.7b", "GPT-3 2.7B", "GPT-3, Table 2.1", 32, 2560, 32, PADDED_GPT_VOCABULARY
            ),
            _dense("gpt-20b", "GPT-NeoX-20B", "GPT-NeoX-20B, Table 1", 44, 6144, 64, 50_432),
            _dense("opt-30b", "OPT-30B", "OPT, Table 1", 48, 7168, 56, 50_272, "relu"),
        )
    }
)


def find_model(name: str) -> Model:
    """Return the layer of that name; raises InputError with the nearest name otherwise."""
    if name in MODELS:
        return MODELS[name]
    if name in WHOLE_MODELS:
        raise InputError(
            f"{name} is a whole model, and no layer", f"plan it:  moetune plan --model {name}"
        )
    raise InputError(
        f"model {name!r} is unknown",
        nearest_then(
            f"known: {', '.join(MODELS)}; or give --d-model, --d-hidden and --num-experts",
            name.lower(),
            MODELS,
        ),
    )
