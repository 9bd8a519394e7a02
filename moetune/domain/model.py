"""Models of the papers by name: MoE layers, and whole transformers."""

from dataclasses import dataclass
from types import MappingProxyType

from moetune.domain.errors import InputError, check_positive
from moetune.domain.layer import Activation, LayerShape
from moetune.domain.layout import nearest_divisors
from moetune.domain.spelling import nearest_then


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Transformer:
    """A decoder in which every `moe_every`-th block has an MoE layer instead of a dense FFN.

    Args:
        moe: the MoE layer; dense FFNs have the width and activation of one expert. In a dense
            model it has a single expert: the FFN.
        num_layers: blocks.
        length: tokens of a sequence.
        moe_every: 1 for experts in every block, 2 for the 2nd, 4th and so on; 0 for a dense model.

    Raises:
        InputError: a size below 1, heads that do not divide the width, or experts in no block.
    """

    moe: LayerShape
    num_layers: int
    num_heads: int
    length: int
    vocab_size: int
    moe_every: int = 2

    def __post_init__(self) -> None:
        check_positive(self, "num_layers", "num_heads", "length", "vocab_size")
        if self.moe_every < 0:
            raise InputError(f"moe_every must be at least 0, got {self.moe_every}")
        if self.moe.d_model % self.num_heads:
            near = nearest_divisors(self.moe.d_model, self.num_heads)
            raise InputError(
                f"d_model ({self.moe.d_model}) does not divide by num_heads ({self.num_heads})",
                f"use {' or '.join(map(str, near))} heads",
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
    def attention_parameters(self) -> int:
        """Of one block: query, key, value and output projections; biases (< 0.1 %) are omitted."""
        return 4 * self.moe.d_model**2

    @property
    def norm_parameters(self) -> int:
        """Of one layer norm: weight and bias."""
        return 2 * self.moe.d_model

    @property
    def ffn_parameters(self) -> int:
        """Of one dense FFN, and of one expert."""
        return self.moe.num_gemms * self.moe.d_model * self.moe.d_hidden

    @property
    def gate_parameters(self) -> int:
        """Of one MoE layer's gate."""
        return self.moe.d_model * self.moe.num_experts

    @property
    def token_parameters(self) -> int:
        """Of the token embedding, and again of the head: they are not tied."""
        return self.vocab_size * self.moe.d_model

    def vocab_per_rank(self, tp: int) -> int:
        """Return the most tokens of the vocabulary that one of `tp` ranks holds."""
        return -(-self.vocab_size // tp)

    @property
    def num_parameters(self) -> int:
        """Of the whole model: token and position embeddings, blocks, last norm and head."""
        positions = self.length * self.moe.d_model
        block = self.attention_parameters + 2 * self.norm_parameters
        experts = self.gate_parameters + self.moe.num_experts * self.ffn_parameters
        num_dense = self.num_layers - self.num_moe_layers
        return (
            2 * self.token_parameters
            + positions
            + self.num_layers * block
            + num_dense * self.ffn_parameters
            + self.num_moe_layers * experts
            + self.norm_parameters
        )


PADDED_GPT_VOCABULARY = 51_200
"""GPT-2's 50,257 tokens, padded by Megatron-LM to a multiple of 128 for each of 8 tensor ranks.

PPMoE names no vocabulary; it builds on Megatron-LM and GPT-3, whose tokens are GPT-2's.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A named MoE layer or whole model; a dense model's layer is its FFN, a single expert.

    Args:
        num_experts: of the layer; None where they grow with the ranks.
        experts_per_rank: where `num_experts` is None.
        tokens_per_rank: of one step in the source, the default of a request.
        transformer: the whole model, where the source has one.
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
    transformer: Transformer | None = None

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


def _ppmoe(name: str, title: str, num_layers: int, d_model: int, num_heads: int) -> Model:
    """Return a model of PPMoE §4.1; the batch is GPT-3's for its backbone (its Table 2.1).

    0.5M tokens on 32 ranks and 2M on 128 are both 16k a rank.
    """
    moe = LayerShape(d_model=d_model, d_hidden=4 * d_model, num_experts=64)
    return Model(
        name=name, title=title, source="PPMoE, §4.1", d_model=d_model, d_hidden=moe.d_hidden,
        num_experts=moe.num_experts, top_k=moe.top_k, activation=moe.activation,
        tokens_per_rank=16_384,
        transformer=Transformer(
            moe=moe, num_layers=num_layers, num_heads=num_heads, length=2048,
            vocab_size=PADDED_GPT_VOCABULARY,
        ),
    )  # fmt: skip


def _dense(
    name: str, title: str, source: str, num_layers: int, d_model: int, num_heads: int,
    vocab_size: int, activation: Activation = "gelu",
) -> Model:  # fmt: skip
    """Return a dense model; its batch is eight sequences a rank, which fill a device."""
    network = LayerShape(
        d_model=d_model, d_hidden=4 * d_model, num_experts=1, activation=activation
    )
    return Model(
        name=name, title=title, source=source, d_model=d_model, d_hidden=network.d_hidden,
        num_experts=1, top_k=1, activation=activation, tokens_per_rank=8 * 2048,
        transformer=Transformer(
            moe=network, num_layers=num_layers, num_heads=num_heads, length=2048,
            vocab_size=vocab_size, moe_every=0,
        ),
    )  # fmt: skip


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
    """Return the model of that name.

    Raises:
        InputError: there is none; the error names the nearest.
    """
    if name in MODELS:
        return MODELS[name]
    raise InputError(
        f"model {name!r} is unknown",
        nearest_then(
            f"known: {', '.join(MODELS)}; or give --d-model, --d-hidden and --num-experts",
            name.lower(),
            MODELS,
        ),
    )
