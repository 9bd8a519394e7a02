"""A paper's transformer as a decoder, whose parameters and FLOPs are counted like any other's."""

from moetune.domain.architecture import Block, Decoder, Part
from moetune.domain.attention import GroupedQueryAttention
from moetune.domain.experts import DenseFfn, RoutedExperts, Router
from moetune.domain.model import Transformer


def paper_decoder(name: str, transformer: Transformer) -> Decoder:
    """Return a paper's transformer as a decoder: learned positions, layer norms, no biases."""
    layer, d_model = transformer.moe, transformer.moe.d_model
    attention = GroupedQueryAttention(
        d_model=d_model,
        num_heads=transformer.num_heads,
        num_kv_heads=transformer.num_heads,
        head_dim=transformer.head_dim,
        v_head_dim=transformer.head_dim,
    )
    dense = DenseFfn(
        d_model=d_model,
        d_hidden=layer.d_hidden,
        is_gated=layer.activation == "swiglu",
        function=layer.activation,
    )
    experts = RoutedExperts(
        d_model=d_model,
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        d_hidden=layer.d_hidden,
        is_gated=dense.is_gated,
        function=layer.activation,
        router=Router(score="softmax", parameters=d_model * layer.num_experts),
    )
    parts: list[Part] = [
        experts if transformer.has_experts(at) else dense for at in range(transformer.num_layers)
    ]
    norm = 2 * d_model  # weight and bias
    return Decoder(
        name=name,
        family="gpt",
        d_model=d_model,
        vocab_size=transformer.vocab_size,
        blocks=tuple(Block(parts=(attention, part), norms=2 * norm) for part in parts),
        norms=norm,
        embedding_extra=transformer.length * d_model,
    )
