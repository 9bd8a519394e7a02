"""Attention of a decoder's block: grouped-query, latent, and compressed sparse attention.

Multiply-accumulates (MACs) are those that Megatron-LM counts (`num_floating_point_operations`).
These are the GEMMs of the projections, and QKᵀ and PV over the mean number of keys that a token
reads. Every part has `parameters`, `forward_macs(length)` of one token in a sequence of `length`
tokens, and `widths`. The widths are the elements of each tensor of a token that the backward pass
may need.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from moetune.domain.errors import InputError, check_positive


def mean_context(length: int, limit: int | None = None) -> float:
    """Return the mean number of keys that a token of a causal sequence reads.

        length/2, or with at most w < length keys: w − w(w − 1)/(2·length)

    Source: Megatron-LM counts half of the mask; Megatron-Bridge, `calculate_swa_context`.

    Args:
        limit: most keys that a token reads: the width of a sliding window or of a selection.
    """
    if limit is None or limit >= length:
        return length / 2
    return limit - limit * (limit - 1) / (2 * length)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedQueryAttention:
    """Attention in which groups of query heads share keys and values.

    Args:
        head_dim: width of a query and a key; `v_head_dim` of a value.
        window: tokens of a sliding window, None for all.
        chunk: tokens of a chunk, which no token reads beyond; None for all.
        gate_width: outputs of a projection that gates the attention's output, 0 for none.
        qkv_biases, out_biases: number of biases of the projections.
        has_value_projection: False where the keys also serve as values.
        indexer: selects each token's keys; None where it reads all of them.

    Raises:
        InputError: a size below 1, or key heads that do not divide the query heads.
    """

    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None
    chunk: int | None = None
    gate_width: int = 0
    qkv_biases: int = 0
    out_biases: int = 0
    norm_parameters: int = 0
    num_sinks: int = 0
    has_value_projection: bool = True
    indexer: "Indexer | None" = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_positive(
            self, "d_model", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "window",
            "chunk",
        )  # fmt: skip
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"num_heads ({self.num_heads}) does not divide by num_kv_heads "
                f"({self.num_kv_heads})"
            )

    @property
    def name(self) -> str:
        """The attention's name in tables."""
        if self.chunk is not None:
            return f"attention, chunks of {self.chunk}"
        if self.indexer is not None:
            return f"attention, top {self.indexer.top_k} keys"
        return "attention" if self.window is None else f"attention, window {self.window}"

    @property
    def is_full(self) -> bool:
        """Whether a token reads all keys before it, and keys are as wide as values."""
        limits = self.window, self.chunk, self.indexer
        return limits == (None, None, None) and self.head_dim == self.v_head_dim

    @property
    def widths(self) -> Mapping[str, int]:
        """Elements of a token's queries, keys, values, gate and heads' output."""
        return {
            "q": self.num_heads * self.head_dim,
            "k": self.num_kv_heads * self.head_dim,
            "v": self.num_kv_heads * self.v_head_dim if self.has_value_projection else 0,
            "gate": self.gate_width,
            "output": self.num_heads * self.v_head_dim,
        }

    @property
    def _projections(self) -> int:
        return self.d_model * sum(self.widths.values())

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        rest = self.qkv_biases + self.out_biases + self.norm_parameters + self.num_sinks
        return self._projections + rest + (0 if self.indexer is None else self.indexer.parameters)

    def forward_macs(self, length: int) -> float:
        """Return the MACs of one token."""
        per_key = self.num_heads * (self.head_dim + self.v_head_dim)
        reach = length if self.chunk is None else min(length, self.chunk)
        if self.indexer is None:
            return self._projections + per_key * mean_context(reach, self.window)
        core = per_key * mean_context(length, self.indexer.top_k)
        return self._projections + core + self.indexer.forward_macs(length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """Small scorer that selects each token's keys (DeepSeek sparse attention, equation 1).

    Args:
        rank: width that its queries are projected from.
        top_k: keys that it selects for a token.
        has_weights: whether each token weights the scores of heads in their sum.
    """

    d_model: int
    rank: int
    num_heads: int
    head_dim: int
    top_k: int
    norm_parameters: int
    has_weights: bool = field(default=True, repr=False)

    @property
    def parameters(self) -> int:
        """Number of parameters: queries, one key head, a weight for each head."""
        return self._projections + self.norm_parameters

    @property
    def _projections(self) -> int:
        queries = self.rank * self.num_heads * self.head_dim
        weights = self.num_heads if self.has_weights else 0
        return queries + self.d_model * (self.head_dim + weights)

    def forward_macs(self, length: int) -> float:
        """Return the MACs of one token: it scores every earlier token."""
        return self._projections + self.num_heads * self.head_dim * mean_context(length)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (low-rank projections); raises InputError for a size below 1.

    Args:
        q_rank: None where queries have a single projection of full rank.
        nope_dim, rope_dim: widths of a head's query without and with rotary positions; all heads
            share one rotary key.
        indexer: selects each token's keys; None for all, or an earlier block's selection.
        top_keys: number of keys that an earlier block's indexer selected.
        norm_parameters: parameters of norms other than those of the two latent vectors.
    """

    d_model: int
    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_head_dim: int
    indexer: Indexer | None = None
    top_keys: int | None = None
    biases: int = 0
    norm_parameters: int = 0
    gate_width: int = 0
    window: int | None = None

    def __post_init__(self) -> None:
        check_positive(self, "d_model", "num_heads", "q_rank", "kv_rank", "v_head_dim", "window")

    @property
    def name(self) -> str:
        """The attention's name in tables."""
        sparse = "" if self._num_keys_read is None else f", top {self._num_keys_read} keys"
        if self.top_keys is not None:
            sparse += " of an earlier block"
        window = "" if self.window is None else f", window {self.window}"
        return f"latent attention{sparse}{window}"

    @property
    def widths(self) -> Mapping[str, int]:
        """Elements of a token's latent vectors, queries, keys, values and heads' output."""
        heads = self.num_heads
        return {
            "q_latent": self.q_rank or 0,
            "kv_latent": self.kv_rank + self.rope_dim,
            "q": heads * (self.nope_dim + self.rope_dim),
            "k": heads * (self.nope_dim + self.rope_dim),
            "v": heads * self.v_head_dim,
            "gate": self.gate_width,
            "output": heads * self.v_head_dim,
        }

    @property
    def _num_keys_read(self) -> int | None:
        """Keys that a token reads at most, None for all."""
        return self.top_keys if self.indexer is None else self.indexer.top_k

    @property
    def _projections(self) -> int:
        width = self.num_heads * (self.nope_dim + self.rope_dim)
        queries = (
            self.d_model * width if self.q_rank is None else self.q_rank * (self.d_model + width)
        )
        keys = self.kv_rank * (self.d_model + self.num_heads * (self.nope_dim + self.v_head_dim))
        output = self.d_model * self.num_heads * self.v_head_dim
        return queries + keys + self.d_model * (self.rope_dim + self.gate_width) + output

    @property
    def latent_parameters(self) -> int:
        """Parameters of the projections to the latent vectors, replicated on every tensor rank.

        Source: Megatron-Core, `multi_latent_attention.py`, parallel_mode "duplicated".
        """
        return self.d_model * ((self.q_rank or 0) + self.kv_rank + self.rope_dim)

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        norms = (self.q_rank or 0) + self.kv_rank + self.norm_parameters
        indexer = 0 if self.indexer is None else self.indexer.parameters
        return self._projections + norms + self.biases + indexer

    def forward_macs(self, length: int) -> float:
        """Return the MACs of one token; selected keys are read in latent form (absorbed)."""
        if self._num_keys_read is None:
            per_key = self.num_heads * (self.nope_dim + self.rope_dim + self.v_head_dim)
            return self._projections + per_key * mean_context(length, self.window)
        per_key = self.num_heads * (2 * self.kv_rank + self.rope_dim)
        core = per_key * mean_context(length, self._num_keys_read)
        scoring = 0 if self.indexer is None else self.indexer.forward_macs(length)
        return self._projections + core + scoring


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttention:
    """DeepSeek-V4's attention: a shared key-value head, a window, compressed older tokens.

    Args:
        rate: tokens that are compressed into one entry, 0 for the window alone.
        indexer: selects among the entries; None where a token reads all of them.
    """

    d_model: int
    num_heads: int
    head_dim: int
    q_rank: int
    window: int
    out_groups: int
    out_rank: int
    rate: int
    indexer: Indexer | None

    def __post_init__(self) -> None:
        names = ("d_model", "num_heads", "head_dim", "q_rank", "window", "out_groups", "out_rank")
        check_positive(self, *names)

    @property
    def name(self) -> str:
        """The attention's name in tables."""
        if not self.rate:
            return f"attention, window {self.window}"
        sparse = "" if self.indexer is None else f", top {self.indexer.top_k}"
        return f"compressed attention, 1 of {self.rate}{sparse}"

    @property
    def widths(self) -> Mapping[str, int]:
        """Elements of a token's latent query, queries, keys and heads' output."""
        queries = self.num_heads * self.head_dim
        return {
            "q_latent": self.q_rank,
            "q": queries,
            "kv": self.head_dim,
            "output": queries,
            "output_latent": self.out_groups * self.out_rank,
        }

    @property
    def _overlap(self) -> int:
        """2 where entries overlap, which are those that an indexer selects from; else 1."""
        return 1 if self.indexer is None else 2

    @property
    def _projections(self) -> int:
        width = self.num_heads * self.head_dim
        queries = self.q_rank * (self.d_model + width)
        output = width * self.out_rank + self.out_groups * self.out_rank * self.d_model
        return queries + self.d_model * self.head_dim + output

    def _compressor(self, width: int) -> int:
        return 2 * self.d_model * self._overlap * width

    @property
    def parameters(self) -> int:
        """Number of parameters: projections, norms, sinks, compressors and the indexer."""
        total = self._projections + self.q_rank + self.head_dim + self.num_heads
        if not self.rate:
            return total
        total += self._compressed_parameters(self.head_dim)
        if self.indexer is None:
            return total
        scores = self.indexer.rank * self.indexer.num_heads * self.indexer.head_dim
        weights = self.d_model * self.indexer.num_heads
        return total + scores + weights + self._compressed_parameters(self.indexer.head_dim)

    def _compressed_parameters(self, width: int) -> int:
        """Return a compressor's parameters: values, gates, a bias for each position, a norm."""
        return self._compressor(width) + self.rate * self._overlap * width + width

    def forward_macs(self, length: int) -> float:
        """Return the MACs of one token.

        Source: Megatron-Bridge, `flop_utils.py`, dsv4_hybrid: the whole window for every token, and
        the entries that a causal mask leaves.
        """
        total = self._projections + self._read(self.window)
        if not self.rate:
            return total
        total += self._compressor(self.head_dim)
        if self.indexer is None:
            return total + self._read(length / self.rate / 2)
        selected = min(self.indexer.top_k, length // self.rate)
        entries = selected * (1 - selected * self.rate / (2 * length))
        scorer = self.indexer
        queries = scorer.num_heads * scorer.head_dim
        indexing = scorer.rank * queries + self.d_model * scorer.num_heads
        scores = queries * length / self.rate
        return total + self._read(entries) + self._compressor(scorer.head_dim) + indexing + scores

    def _read(self, entries: float) -> float:
        return 2 * self.num_heads * self.head_dim * entries
