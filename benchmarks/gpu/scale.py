"""Sizes of a run: those of one large GPU, and small ones that take every path on a CPU.

Each part's time is estimated from its sizes, so that all of them fit the limit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from benchmarks.gpu.jobs import Job, gpu_jobs, small_jobs
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.model import MODELS

LIMIT_SECONDS = 480.0
"""Of all parts together."""
_MODELS = ("gpt-s", "bert-l", "gpt-xl")
# Of an H200's 495 TMAC/s (bf16, without sparsity): a layer's small chunks reach a part of it.
_MACS_PER_SECOND = 1e14
_START_SECONDS = 12.0
_STEPS_A_DECISION = 16
_STRATEGIES, _REUSE_DEGREES = 5, 2
_JOB_SECONDS = 22.0
_UNEVEN_SECONDS, _TEST_SECONDS, _PUBLISHED_SECONDS = 6.0, 12.0, 18.0
_PROFILE_SECONDS = (40.0, 130.0)
"""Least and most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Sizes of a run.

    Args:
        device: "cuda" or "cpu".
        num_ranks: of the profile and of the layers that exchange over a real link.
        models: of MPipeMoE's Table III, each as one of 64 ranks sees it.
        several_experts: layers of which a rank has several experts, for the profile alone.
        tokens: of a step on one rank.
        budget_seconds: of the profile.
        uneven_layers, uneven_rows: of the products with uneven loads; all experts on one rank.
        published_layers, published_degrees: on one GPU alone, each with its tokens.
        jobs: models in chunks.
        tests: files of tests that need a GPU, and are skipped without one.
    """

    device: str
    num_ranks: int
    models: Mapping[str, LayerShape]
    several_experts: tuple[LayerShape, ...]
    tokens: tuple[int, ...]
    degrees: tuple[int, ...]
    reuse_degrees: tuple[int, ...]
    num_rounds: int
    dtype: str
    dtypes: tuple[str, ...]
    budget_seconds: float
    uneven_layers: tuple[LayerShape, ...]
    uneven_rows: tuple[int, ...]
    published_layers: tuple[tuple[LayerShape, int], ...]
    published_degrees: tuple[int, ...]
    jobs: tuple[Job, ...]
    tests: tuple[str, ...]

    @property
    def torch_device(self) -> torch.device:
        """The device that this process computes on."""
        return torch.device(self.device)

    def workload(self, model: str, tokens: int, num_ranks: int = 1) -> Workload:
        """Return the share of one rank: its only expert sees as many rows as it sends."""
        shape = self.models[model]
        layer = LayerShape(
            d_model=shape.d_model, d_hidden=shape.d_hidden, num_experts=num_ranks, top_k=1,
            activation=shape.activation,
        )  # fmt: skip
        return Workload(layer=layer, world_size=num_ranks, tokens_per_rank=tokens, dtype=self.dtype)

    def estimates(self) -> dict[str, float]:
        """Return the seconds of each part on an H200, its start included; rough ones."""
        macs = sum(
            6 * self.workload(model, tokens).macs for model in self.models for tokens in self.tokens
        )
        largest = 6 * self.workload(list(self.models)[-1], self.tokens[-1]).macs
        worlds = 1 + (self.num_ranks > 1)
        steps = worlds * _STEPS_A_DECISION * len(self.degrees)
        reused = _STEPS_A_DECISION * _STRATEGIES * _REUSE_DEGREES
        return {
            "tests": _START_SECONDS + _TEST_SECONDS,
            "profile": _START_SECONDS + self.budget_seconds,
            "layers": worlds * _START_SECONDS + steps * macs / _MACS_PER_SECOND,
            "reuse": _START_SECONDS + reused * largest / _MACS_PER_SECOND,
            "published": _START_SECONDS + _PUBLISHED_SECONDS,
            "uneven": _START_SECONDS + _UNEVEN_SECONDS,
            "chunks": _START_SECONDS + len(self.jobs) * _JOB_SECONDS,
        }


def gpu_scale(limit_seconds: float = LIMIT_SECONDS) -> Scale:
    """Return the sizes for one GPU with at least 40 GB, or several.

    Args:
        limit_seconds: of all parts. With less, fewer models are trained in chunks, the largest
            first, and then the profile has less time.
    """
    scale = _largest_scale()
    while scale.jobs and _left_seconds(scale, limit_seconds) < 0:
        scale = replace(scale, jobs=scale.jobs[:-1])
    least, most = _PROFILE_SECONDS
    budget = least + _left_seconds(scale, limit_seconds)
    return replace(scale, budget_seconds=min(max(budget, least), most))


def _left_seconds(scale: Scale, limit_seconds: float) -> float:
    return limit_seconds - sum(scale.estimates().values())


def _largest_scale() -> Scale:
    """Return all sizes, and the least time for the profile."""
    return Scale(
        device="cuda",
        num_ranks=max(torch.cuda.device_count(), 1),
        models={
            name: LayerShape(
                d_model=MODELS[name].d_model, d_hidden=MODELS[name].d_hidden, num_experts=1,
                top_k=1, activation=MODELS[name].activation,
            )
            for name in _MODELS
        },
        several_experts=(
            LayerShape(
                d_model=2048, d_hidden=1408, num_experts=8 * max(torch.cuda.device_count(), 1),
                top_k=2, activation="swiglu",
            ),
        ),
        tokens=(4096, 8192, 16384),
        degrees=(1, 2, 4, 8, 16),
        reuse_degrees=(4, 8),
        num_rounds=7,
        dtype="bfloat16",
        dtypes=("float32", "bfloat16"),
        budget_seconds=_PROFILE_SECONDS[0],
        uneven_layers=tuple(
            LayerShape(d_model=d_model, d_hidden=d_hidden, num_experts=experts)
            for experts, d_model, d_hidden in (
                (8, 4096, 14336), (8, 2048, 1408), (16, 2048, 768), (64, 2048, 1408),
            )
        ),
        uneven_rows=(2048, 8192, 32768),
        published_layers=_published_layers(),
        published_degrees=(1, 4),
        jobs=gpu_jobs(),
        tests=("tests/runtime/test_layer_cuda.py",),
    )  # fmt: skip


def dry_scale() -> Scale:
    """Return sizes of milliseconds on a CPU, with two ranks over gloo where there is a link."""
    layer = LayerShape(d_model=32, d_hidden=64, num_experts=1, top_k=1)
    return Scale(
        device="cpu",
        num_ranks=2,
        models={"small": layer},
        several_experts=(),
        tokens=(64,),
        degrees=(1, 2),
        reuse_degrees=(2,),
        num_rounds=2,
        dtype="float32",
        dtypes=("float32",),
        budget_seconds=8.0,
        uneven_layers=(LayerShape(d_model=32, d_hidden=64, num_experts=4),),
        uneven_rows=(64,),
        published_layers=((LayerShape(d_model=32, d_hidden=64, num_experts=4), 64),),
        published_degrees=(1, 2),
        jobs=small_jobs(),
        tests=("tests/runtime/test_layer_cuda.py",),
    )


def _published_layers() -> tuple[tuple[LayerShape, int], ...]:
    """Return layers as of Mixtral 8x7B, DeepSeek-V2-Lite and Qwen3-30B-A3B, and a small one."""
    sizes = (
        (4096, 14336, 8, 2, 8192), (2048, 1408, 64, 6, 8192), (2048, 768, 128, 8, 8192),
        (512, 1024, 16, 2, 1024),
    )  # fmt: skip
    return tuple(
        (
            LayerShape(
                d_model=d_model, d_hidden=d_hidden, num_experts=experts, top_k=top_k,
                activation="swiglu",
            ),
            tokens,
        )
        for d_model, d_hidden, experts, top_k, tokens in sizes
    )  # fmt: skip
