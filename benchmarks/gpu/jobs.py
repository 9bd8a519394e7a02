"""Jobs of the part on chunks: one model trained in one way, within 40 GB of a GPU's memory."""

from dataclasses import dataclass, replace

from moetune.domain.layer import LayerShape
from moetune.domain.model import Transformer

_GIB = 2**30
_HEAD_DIM, _WIDE = 64, 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One model trained in one way; the activations of its blocks are computed again.

    Args:
        way: "plain", "chunks" or "fsdp2".
        sequences: of a step.
        cache_bytes: of our replicated cache.
    """

    name: str
    way: str
    layers: int
    d_model: int
    num_experts: int = 1
    length: int
    vocab: int
    sequences: int
    chunk_bytes: int
    cache_bytes: int

    @property
    def transformer(self) -> Transformer:
        """The model; heads as GPT-2's and, of wide models, as later ones'."""
        return Transformer(
            moe=LayerShape(
                d_model=self.d_model, d_hidden=4 * self.d_model, num_experts=self.num_experts
            ),
            num_layers=self.layers,
            num_heads=self.d_model // (_HEAD_DIM if self.d_model < _WIDE else 2 * _HEAD_DIM),
            length=self.length,
            vocab_size=self.vocab,
            moe_every=0 if self.num_experts == 1 else 2,
        )


def gpu_jobs() -> tuple[Job, ...]:
    """Return a model that plain PyTorch can train within 40 GB, and one whose states it cannot."""
    fits = Job(
        name="1.3B", way="plain", layers=24, d_model=2048, length=1024, vocab=50304, sequences=8,
        chunk_bytes=_GIB // 2, cache_bytes=4 * _GIB,
    )  # fmt: skip
    larger = replace(fits, name="2.7B", layers=32, d_model=2560)
    return (
        *(replace(fits, way=way) for way in ("plain", "chunks", "fsdp2")),
        *(replace(larger, way=way) for way in ("chunks", "fsdp2")),
    )


def small_jobs() -> tuple[Job, ...]:
    """Return every way for a small model, and one with experts."""
    small = Job(
        name="small", way="plain", layers=2, d_model=64, length=16, vocab=64, sequences=2,
        chunk_bytes=2**17, cache_bytes=2**20,
    )  # fmt: skip
    return (
        *(replace(small, way=way) for way in ("plain", "chunks", "fsdp2")),
        replace(small, name="small experts", way="chunks", num_experts=4),
    )
