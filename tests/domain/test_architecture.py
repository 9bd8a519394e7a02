"""Parts of a decoder: names, widths of a token's tensors, and sizes counted by hand."""

from dataclasses import replace

import pytest

from moetune.domain.architecture import Block, Decoder, Mixer
from moetune.domain.attention import (
    CompressedAttention,
    GroupedQueryAttention,
    Indexer,
    LatentAttention,
    mean_context,
)
from moetune.domain.experts import DenseFfn, RoutedExperts, Router
from moetune.domain.recurrent import GatedDeltaNet, LinearAttention, ShortConvolution, StateSpace
from moetune.report.doubts import uncounted_words

INDEXER = Indexer(d_model=64, rank=24, num_heads=2, head_dim=8, top_k=16, norm_parameters=16)
GROUPED = GroupedQueryAttention(
    d_model=64, num_heads=8, num_kv_heads=2, head_dim=16, v_head_dim=8, gate_width=8
)
LATENT = LatentAttention(
    d_model=64, num_heads=4, q_rank=24, kv_rank=16, nope_dim=8, rope_dim=4, v_head_dim=8
)
ROUTER = Router(score="softmax", parameters=64 * 8)


def _compressed(rate: int) -> CompressedAttention:
    return CompressedAttention(
        d_model=64, num_heads=4, head_dim=16, q_rank=24, window=8, out_groups=2, out_rank=6,
        rate=rate, indexer=INDEXER if rate == 4 else None,
    )  # fmt: skip


def _experts(**changes: object) -> RoutedExperts:
    sizes: dict[str, object] = {
        "d_model": 64, "num_experts": 8, "top_k": 2, "d_hidden": 32, "router": ROUTER,
    }  # fmt: skip
    return RoutedExperts(**{**sizes, **changes})  # type: ignore[arg-type]


def test_grouped_query_attention_counts_its_projections() -> None:
    assert GROUPED.widths == {"q": 128, "k": 32, "v": 16, "gate": 8, "output": 64}
    assert GROUPED.parameters == 64 * (128 + 32 + 16 + 8 + 64)
    assert GROUPED.forward_macs(10) == GROUPED.parameters + 8 * (16 + 8) * 5


def test_latent_attention_counts_its_low_rank_projections() -> None:
    down, up = 64 * 24 + 64 * (16 + 4), 24 * 4 * 12 + 16 * 4 * 16
    assert LATENT.parameters == down + up + 64 * 32 + 24 + 16
    assert LATENT.widths == {
        "q_latent": 24, "kv_latent": 20, "q": 48, "k": 48, "v": 32, "gate": 0, "output": 32,
    }  # fmt: skip
    assert LATENT.forward_macs(10) == down + up + 64 * 32 + 4 * (12 + 8) * 5


def test_selected_keys_are_bounded_and_read_in_latent_form() -> None:
    sparse = LatentAttention(d_model=64, num_heads=4, q_rank=24, kv_rank=16, nope_dim=8, rope_dim=4,
                          v_head_dim=8, indexer=INDEXER)  # fmt: skip
    borrowed = LatentAttention(d_model=64, num_heads=4, q_rank=24, kv_rank=16, nope_dim=8,
                               rope_dim=4, v_head_dim=8, top_keys=16)  # fmt: skip
    indexer = 24 * 16 + 64 * (8 + 2)
    assert sparse.parameters - LATENT.parameters == indexer + 16
    assert borrowed.parameters == LATENT.parameters
    assert sparse.forward_macs(64) - borrowed.forward_macs(64) == indexer + 2 * 8 * 32
    keys = sum(min(at + 1, 16) for at in range(64)) / 64
    plain = LATENT.forward_macs(0)
    assert borrowed.forward_macs(64) == plain + 4 * (16 + 4 + 16) * keys


def test_compressed_attention_reads_a_window_and_entries() -> None:
    window, heavy, light = (_compressed(rate) for rate in (0, 128, 4))
    projections = 24 * (64 + 64) + 64 * 16 + 64 * 6 + 2 * 6 * 64
    assert window.forward_macs(256) == projections + 2 * 64 * 8
    assert heavy.forward_macs(256) == projections + 2 * 64 * (8 + 1) + 2 * 64 * 16
    assert window.parameters == projections + 24 + 16 + 4
    assert heavy.parameters == window.parameters + 2 * 64 * 16 + 128 * 16 + 16
    scorer = 24 * 16 + 64 * 2
    compressors = 2 * 64 * 2 * (16 + 8)
    entries = 16 * (1 - 16 * 4 / 512)
    scores = 16 * 256 / 4
    expected = projections + 2 * 64 * (8 + entries) + compressors + scorer + scores
    assert light.forward_macs(256) == pytest.approx(expected)
    norms = 4 * 2 * (16 + 8) + 16 + 8
    assert light.parameters == window.parameters + compressors + scorer + norms
    assert light.widths["kv"] == 16


def test_recurrent_mixers_cost_the_same_at_any_length() -> None:
    delta = GatedDeltaNet(d_model=64, num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8,
                          kernel=4, gate_width=32, num_head_gates=8,
                          extra_parameters=0)  # fmt: skip
    low_rank = GatedDeltaNet(d_model=64, num_key_heads=4, num_value_heads=4, key_dim=8, value_dim=8,
                             kernel=4, gate_width=0, num_head_gates=4, gate_rank=8,
                             extra_parameters=0)  # fmt: skip
    mamba2 = StateSpace(
        d_model=64, d_inner=128, d_state=16, kernel=4, num_groups=2, num_heads=8, extra_parameters=0
    )
    mamba1 = StateSpace(d_model=64, d_inner=128, d_state=16, kernel=4, rank=4, extra_parameters=0)
    lightning = LinearAttention(
        d_model=64, num_heads=4, num_kv_heads=4, head_dim=16, gate_width=64, extra_parameters=0
    )
    convolution = ShortConvolution(d_model=64, kernel=3, biases=5)
    assert delta.parameters == 64 * (16 + 16 + 32 + 32 + 32 + 8) + 4 * 64
    assert delta.forward_macs(9) == delta.parameters + 4 * 4 * 64
    assert delta.widths == {"q": 16, "k": 16, "v": 32, "gate": 32, "output": 32}
    assert low_rank.parameters == 64 * (4 * 32 + 4) + 8 * (128 + 64) + 4 * 96
    assert low_rank.widths["gate"] == 64
    assert mamba2.parameters == 64 * (2 * 128 + 64 + 8) + 128 * 64 + 4 * (128 + 64)
    assert mamba2.widths == {"x": 128, "gate": 128, "states": 64, "steps": 8, "output": 128}
    assert mamba1.parameters == 64 * 256 + 128 * (4 + 32) + 4 * 128 + 128 * 64 + 4 * 128
    assert mamba1.forward_macs(9) == mamba1.parameters + 3.5 * 128 * 16
    assert lightning.parameters == 5 * 64 * 64
    assert lightning.forward_macs(9) == lightning.parameters + 2 * 4 * 16 * 16
    assert lightning.widths["gate"] == 64
    assert convolution.parameters == 4 * 64 * 64 + 3 * 64 + 5
    assert convolution.forward_macs(9) == convolution.parameters - 5
    assert convolution.widths == {"gates": 128, "x": 64, "output": 64}
    names = [part.name for part in (delta, low_rank, mamba2, mamba1, lightning, convolution)]
    assert len(set(names)) == 6
    for mixer in (delta, low_rank, mamba2, mamba1, lightning, convolution):
        assert mixer.forward_macs(9) == mixer.forward_macs(9000)


def test_names_say_what_a_token_reads() -> None:
    windowed = GroupedQueryAttention(
        d_model=64, num_heads=8, num_kv_heads=2, head_dim=16, v_head_dim=16, window=32
    )
    borrowed = LatentAttention(d_model=64, num_heads=4, q_rank=None, kv_rank=16, nope_dim=8,
                               rope_dim=4, v_head_dim=8, top_keys=16)  # fmt: skip
    assert windowed.name == "attention, window 32"
    assert GROUPED.name == "attention"
    assert borrowed.name == "latent attention, top 16 keys of an earlier block"
    assert _compressed(0).name == "attention, window 8"
    assert _compressed(128).name == "compressed attention, 1 of 128"
    assert _compressed(4).name == "compressed attention, 1 of 4, top 16"


def test_experts_have_widths_of_all_their_choices() -> None:
    shared = DenseFfn(d_model=64, d_hidden=48)
    experts = _experts(shared=shared)
    assert experts.widths == {"dispatched": 128, "hidden": 128, "shared": 96}
    plain = _experts(is_gated=False, function="relu2", latent=16)
    assert plain.widths == {"dispatched": 32, "hidden": 64}
    assert plain.layer.activation == "relu"
    assert _experts(is_gated=False, function="gelu_new").layer.activation == "gelu"


def test_blocks_of_keys_may_be_selected_for_groups_of_queries() -> None:
    """MiniMax-M3: the scorer has no weights of its heads, and the core reads what it selects."""
    scorer = replace(INDEXER, rank=64, has_weights=False, norm_parameters=0)
    sparse = replace(GROUPED, indexer=scorer)
    projections = 64 * 2 * 8 + 64 * 8
    assert scorer.parameters == projections
    assert sparse.parameters == GROUPED.parameters + projections
    core = 8 * (16 + 8) * mean_context(64, 16)
    scoring = projections + 2 * 8 * 64 / 2
    assert sparse.forward_macs(64) == GROUPED.parameters + core + scoring
    assert sparse.name == "attention, top 16 keys"


def test_towers_that_are_not_counted_are_named_in_a_sentence() -> None:
    plain = _decoder(GROUPED)
    assert uncounted_words(plain) == ()
    (vision,) = uncounted_words(replace(plain, uncounted=("vision",)))
    assert vision.startswith("The vision tower is not counted")
    (three,) = uncounted_words(replace(plain, uncounted=("vision", "audio", "speech")))
    assert three.startswith("The vision, audio and speech towers are not counted")


def test_digests_of_decoders_keep_while_none_has_what_came_later() -> None:
    plain = _decoder(GROUPED)
    assert plain.identity == repr(plain)
    assert replace(plain, path="/a/config.json", uncounted=("audio",)).identity == plain.identity
    assert replace(plain, tables=8).identity != plain.identity
    scored = _decoder(replace(GROUPED, indexer=INDEXER))
    assert scored.identity != plain.identity
    assert "indexer" not in plain.identity


def _decoder(*mixers: Mixer) -> Decoder:
    ffn = DenseFfn(d_model=64, d_hidden=32)
    blocks = tuple(Block(parts=(mixer, ffn), norms=128) for mixer in mixers)
    return Decoder(name="x", family="x", d_model=64, vocab_size=100, blocks=blocks, norms=64)
