"""The benchmark's own parts of a job of torchtitan: text, tokens, records and float32 experts.

All of them take their places by torchtitan's configuration.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config.override import derive, override
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.moe import GroupedExperts

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
_TEXT = Path(__file__).parents[2] / "docs" / "mathematics.md"


class Bytes(BaseTokenizer):  # type: ignore[misc] # torchtitan is no dependency
    """Bytes as tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc] # torchtitan is no dependency
        """Nothing to choose."""

    def __init__(self, _config: Any = None, **options: Any) -> None:
        super().__init__()
        del options

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return 256


class Text(BaseDataLoader):  # type: ignore[misc] # torchtitan is no dependency
    """A page of the documentation, over and over."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc] # torchtitan is no dependency
        """Nothing to choose."""

    def __init__(
        self,
        _config: Any = None,
        *,
        dp_rank: int,
        dp_world_size: int,
        seq_len: int,
        local_batch_size: int,
        **options: Any,
    ) -> None:
        del options
        self._step, self._place, self._num_ranks = 0, dp_rank, dp_world_size
        self._shape = local_batch_size, seq_len + 1
        self._tokens = torch.tensor(list(_TEXT.read_bytes()))

    def __iter__(self) -> Iterator[Batch]:
        size = self._shape[0] * self._shape[1]
        while True:
            low = (self._step * self._num_ranks + self._place) * size
            low %= len(self._tokens) - size
            self._step += 1
            rows = self._tokens[low : low + size].view(self._shape)
            yield {"input": rows[:, :-1].contiguous()}, rows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, int]:
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._step = state["step"]


class Records(MetricsProcessor):  # type: ignore[misc] # torchtitan is no dependency
    """Losses, norms of gradients and times of steps, besides what torchtitan logs."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc] # torchtitan is no dependency
        """As that of `MetricsProcessor`."""

    def __init__(self, *values: Any, **options: Any) -> None:
        super().__init__(*values, **options)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.seconds: list[tuple[float, float]] = []
        self._since = _now()

    def log(self, step: int, loss: float, most: float, norm: float, **options: Any) -> None:
        before, self._since = self._since, _now()
        self.losses.append(loss)
        self.norms.append(norm)
        self.seconds.append((self._since[0] - before[0], self._since[1] - before[1]))
        super().log(step, loss, most, norm, **options)


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


class Float32Experts(GroupedExperts):  # type: ignore[misc] # torchtitan is no dependency
    """torchtitan's experts without their rounding to bfloat16: a matrix after the other."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):  # type: ignore[misc] # torchtitan is no dependency
        """As that of `GroupedExperts`."""

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        matrices = (
            (each.to_local() if isinstance(each, DTensor) else each).unbind()
            for each in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        rows = x_RD.split(num_tokens_per_expert_E.tolist())
        results = [
            (functional.silu(x @ w1.T) * (x @ w3.T)) @ w2.T
            for x, w1, w2, w3 in zip(rows, *matrices, strict=True)
        ]
        return torch.cat(results)


@override(target=FlexAttention.Config, description="attention that a CPU differentiates")  # type: ignore[untyped-decorator]
def plain_attention(config: Any) -> Any:
    return derive(config, ScaledDotProductAttention.Config)


@override(target=GroupedExperts.Config, exact=True, description="experts in float32")  # type: ignore[untyped-decorator]
def float32_experts(config: Any) -> Any:
    return derive(config, Float32Experts.Config)
