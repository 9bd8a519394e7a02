"""Operations, bytes and stops of a layer's step on CUDA, counted without a GPU.

    python -m benchmarks.launches                   write docs/results/launches.md
    python -m benchmarks.launches --record COMMIT   keep this commit's counts as those before

One rank of several runs a step on the fake GPUs of `tests.cuda_kit`, whose peers send what it sends
itself. Every ATen operation on tensors of the GPU counts as one launch, except views and
allocations; its bytes are those of the tensors that it is given and that it writes. Products are
not computed, which changes none of the counts: only the gate's are, since it chooses the experts.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from moetune.domain.plan import Decision
from moetune.runtime.moe.expert_module import Experts
from moetune.runtime.moe.layer import MoELayer
from tests.cuda_kit import FakeCuda, MirrorWorld

_RESULT = Path(__file__).parents[1] / "docs/results/launches.md"
_RECORD = _RESULT.with_suffix(".json")
_PRODUCTS = frozenset({"mm", "addmm", "addmm_", "bmm", "baddbmm", "_grouped_mm"})
_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A layer on several ranks, and the chunks of its step.

    Args:
        num_local: experts of the counted rank.
        tokens: of each rank.
    """

    name: str
    d_model: int
    d_hidden: int
    num_local: int
    num_ranks: int
    top_k: int
    activation: str
    tokens: int
    degrees: tuple[int, int]
    strategy: str = "none"


def _layer_a(degrees: tuple[int, int], strategy: str = "none") -> Case:
    of = "" if strategy == "none" else f", {strategy}"
    return Case(
        name=f"A, degrees {degrees[0]} and {degrees[1]}{of}", d_model=2048, d_hidden=8192,
        num_local=8, num_ranks=8, top_k=2, activation="gelu", tokens=16384, degrees=degrees,
        strategy=strategy,
    )  # fmt: skip


def _many_experts(degree: int, strategy: str = "none") -> Case:
    of = "" if strategy == "none" else f", {strategy}"
    return Case(
        name=f"32 local experts, swiglu, degree {degree}{of}", d_model=1024, d_hidden=512,
        num_local=32, num_ranks=2, top_k=2, activation="swiglu", tokens=8192,
        degrees=(degree, degree), strategy=strategy,
    )  # fmt: skip


_PREFACE = (
    "Counted, not timed, and without a GPU: `python -m benchmarks.launches` runs one rank's step",
    "on the fake GPUs of the tests, in bfloat16 with grouped kernels. A launch is an operation of",
    "ATen that is neither a view nor an allocation. Its bytes are those of the tensors that it is",
    "given and that it writes, each once, those of products included. A stop is a wait of the host",
    "for the GPU. The phases are those of a layer's later steps: its first forward pass has one",
    "stop more. Experts get equally many tokens. 640 and 768 tokens were counted of A, 256 and 512",
    "of the other layer, and bytes continued from both along a line: at 1,024 tokens they are then",
    "those counted, but for 0.02 % of A's backward pass of degree 5.",
    "",
    "A has d_model 2048, d_hidden 8192, 64 experts on 8 ranks, top-2, gelu with biases and 16,384",
    "tokens a rank; the other layer d_model 1024, d_hidden 512, 64 experts on 2 ranks, top-2,",
    "swiglu and 8,192 tokens.",
    "",
)
_COUNTED = {8: (640, 768), 2: (256, 512)}
"""Tokens that are counted, by ranks: enough that no expert is idle in a piece."""
CASES = (
    _layer_a((1, 1)), _layer_a((4, 4)), _layer_a((4, 5)), _layer_a((4, 4), "S4"),
    _many_experts(1), _many_experts(4), _many_experts(8), _many_experts(8, "S4"),
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Counts:
    """What one phase of a step issued.

    Args:
        launches: by the operation's name.
        num_bytes: read and written.
        stops: operations for which the host waited.
    """

    launches: dict[str, int] = field(default_factory=dict)
    num_bytes: int = 0
    stops: int = 0

    @property
    def num_launches(self) -> int:
        """All of them."""
        return sum(self.launches.values())


class _Counter(TorchDispatchMode):
    """Counts operations on the fake GPU, and leaves products out of what is computed."""

    def __init__(self, gate_width: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's mode has no types
        self.counts = Counts()
        self._gate_width = gate_width

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's
        types: Any,  # noqa: ANN401 - torch's
        args: Sequence[Any] = (),
        kwargs: Any = None,  # noqa: ANN401 - torch's
    ) -> Any:  # noqa: ANN401 - whatever the operation returns
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]  # noqa: SLF001 - an operation's name
        if name not in _PRODUCTS or self._is_gates(args):
            result = func(*args, **kwargs)
        else:
            result = _uncomputed(name, args, kwargs)
        tensors = [one for one in _tensors((args, kwargs, result)) if one.is_cuda]
        if tensors and not _is_view(func) and name not in _ALLOCATIONS:
            self.counts.launches[name] = self.counts.launches.get(name, 0) + 1
            self.counts.num_bytes += _bytes(name, args, kwargs, result)
        return result

    def _is_gates(self, args: Sequence[Any]) -> bool:
        return any(self._gate_width in one.shape for one in _tensors(args))


def _uncomputed(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Return a product's memory, whatever is in it."""
    if "out" in kwargs or name.endswith("_"):
        out: torch.Tensor = kwargs["out"] if "out" in kwargs else args[0]
        return out
    x, w = [one for one in args if isinstance(one, torch.Tensor)][-2:]
    if name == "_grouped_mm":
        x, w = args[:2]
        offs = kwargs["offs"] if "offs" in kwargs else args[2]
        groups = (len(offs),) if w.dim() == x.dim() else ()
        made: torch.Tensor = x.new_empty((*groups, x.shape[0], w.shape[-1]))
        return made
    wider = [one for one in args if isinstance(one, torch.dtype)]
    dtype = wider[0] if wider else x.dtype
    return torch.empty((*x.shape[:-1], w.shape[-1]), dtype=dtype, device=x.device)


def _bytes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: object) -> int:
    """Return the bytes that an operation reads and writes, each tensor once."""
    memory = {}
    for one in _tensors((args, kwargs, result)):
        span = 1 + sum((n - 1) * s for n, s in zip(one.shape, one.stride(), strict=True))
        values = 0 if not one.numel() else min(one.numel(), span)
        memory[one.data_ptr(), tuple(one.shape)] = values * one.element_size()
    if name == "index_select":  # only the rows that it takes
        source = args[0]
        taken = len(args[2]) * source.numel() // max(1, len(source)) * source.element_size()
        memory[source.data_ptr(), tuple(source.shape)] = taken
    return sum(memory.values())


def _is_view(func: Any) -> bool:  # noqa: ANN401 - torch's
    schema = func._schema  # noqa: SLF001 - which arguments it aliases
    returns = [one.alias_info for one in schema.returns]
    writes = any(one.alias_info is not None and one.alias_info.is_write for one in schema.arguments)
    return bool(returns) and not writes and all(one is not None for one in returns)


def _tensors(value: object) -> list[torch.Tensor]:
    return [one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]


def count(case: Case, *, tokens: int | None = None) -> tuple[Counts, Counts]:
    """Return what the forward and the backward pass of a later step issue on one rank.

    Args:
        tokens: in place of the case's.
    """
    torch.manual_seed(0)
    device, num_experts = torch.device("cuda", 0), case.num_local * case.num_ranks
    phases: list[Counts] = []
    with ExitStack() as stack:
        cuda = stack.enter_context(FakeCuda(1))
        stack.enter_context(MirrorWorld(cuda, num_ranks=case.num_ranks))
        layer = _pinned_layer(case, device)
        x = _balanced(layer, tokens or case.tokens).to(device)
        x.requires_grad_()
        for _ in range(2):  # what is made once is made in the first step
            phases.clear()
            layer.zero_grad()
            with _Counter(num_experts) as counter:
                before = len(cuda.syncs)
                y = layer(x)
                counter.counts.stops = len(cuda.syncs) - before
                phases.append(counter.counts)
                grad = torch.ones_like(y)
                counter.counts, before = Counts(), len(cuda.syncs)
                y.backward(grad)
                counter.counts.stops = len(cuda.syncs) - before
                phases.append(counter.counts)
    return phases[0], phases[1]


def _pinned_layer(case: Case, device: torch.device) -> MoELayer:
    """Return a layer with the case's decision; nobody draws its weights, as no product is made."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Experts, "reset", lambda *_: None)
        layer = MoELayer(
            case.d_model, case.d_hidden, case.num_local * case.num_ranks, case.top_k,
            activation=case.activation,  # type: ignore[arg-type] # one of the four
            memory_reuse=case.strategy, device=device, dtype=torch.bfloat16,
        )  # fmt: skip
    forward, backward = case.degrees
    layer.pin(Decision(
        forward_degree=forward, backward_degree=backward,
        strategy=case.strategy,  # type: ignore[arg-type] # one of the five
    ))  # fmt: skip
    return layer


def _balanced(layer: MoELayer, num_tokens: int) -> torch.Tensor:
    """Return tokens that choose all experts in turn, and let the gate read them so."""
    shape = layer.shape
    with torch.no_grad():
        layer.gate.weight.copy_(torch.eye(*layer.gate.weight.shape).to(layer.gate.weight))
    places = torch.arange(num_tokens * shape.top_k) % shape.num_experts
    x_TD = torch.zeros(num_tokens, shape.d_model)
    x_TD.scatter_(1, places.view(num_tokens, shape.top_k), 1.0)
    return x_TD.bfloat16()


def whole_count(case: Case) -> tuple[Counts, Counts]:
    """Return the counts of all of the case's tokens, continued from two smaller numbers of them.

    Bytes grow along a line with the tokens. Launches are those of the larger number.
    """
    few, more = (count(case, tokens=tokens) for tokens in _COUNTED[case.num_ranks])
    small_tokens, large_tokens = _COUNTED[case.num_ranks]
    rest = (case.tokens - large_tokens) / (large_tokens - small_tokens)
    for small, large in zip(few, more, strict=True):
        large.num_bytes += round(rest * (large.num_bytes - small.num_bytes))
    return more


def main() -> None:
    """Count, print and write the table; with --record, the counts of this commit as "before"."""
    found = {
        case.name: [
            {"launches": one.num_launches, "bytes": one.num_bytes, "stops": one.stops}
            for one in whole_count(case)
        ]
        for case in CASES
    }
    if "--record" in sys.argv:
        commit = sys.argv[sys.argv.index("--record") + 1]
        text = json.dumps({"commit": commit, "cases": found}, indent=1)
        _RECORD.write_text(text + "\n", encoding="utf-8")
        return
    before = json.loads(_RECORD.read_text(encoding="utf-8"))
    report = _report(before, found)
    print(report)
    _RESULT.write_text(report, encoding="utf-8")


def _report(before: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    lines = [
        "# Launches of a layer on CUDA", "", *_PREFACE,
        f"Before is commit {before['commit']}.", "",
        "| layer | phase | launches before | after | GB before | after | stops before | after |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for name, phases in found.items():
        for phase, old, new in zip(
            ("forward", "backward"), before["cases"][name], phases, strict=True
        ):
            lines.append(
                f"| {name} | {phase} | {old['launches']} | {new['launches']} "
                f"| {old['bytes'] / 1e9:.1f} | {new['bytes'] / 1e9:.1f} "
                f"| {old['stops']} | {new['stops']} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
