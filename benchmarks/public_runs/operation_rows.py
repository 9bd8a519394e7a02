"""Rows of `operations.csv`: the times that they print, and how a plan prices each.

A source prints a time or a bandwidth, and its bytes are those of its own definition:

    bus        size · 2·(g − 1)/g of an all-reduce, (g − 1)/g of gathers, scatters and all-to-alls
    logical    each token once for every node (one node: rank) that it reaches, its own among them

DeepEP's, HybridEP's ("algorithm") and UCCL's tests count so (deepseek-ai/DeepEP, tests/utils.py,
`count_rdma_send_from_routing_map`), with 1 + 4/128 bytes an element in fp8. A plan sends bfloat16:
rows in fp8 are priced as tokens of as many bytes.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

from benchmarks.public_runs.decoders import decoder_named
from moetune.domain.experts import DenseFfn, RoutedExperts, Router
from moetune.domain.reference import TransferPhase
from moetune.domain.samples import CollectiveOp, EvenForm
from moetune.domain.training import FoldedLayout, TokenDispatcher, TrainingJob
from moetune.solve.model.activations import ELEMENT
from moetune.solve.model.block import BlockPrices
from moetune.solve.model.exchange import exchange_seconds
from moetune.solve.model.machine import DevicePrices, RankSpan

_FP8 = (1 + 4 / 128) / ELEMENT
_EXPERTS, _MOST_GROUPS = 256, 4
"""Of DeepEP's own test between nodes, unless a row says its local experts: groups are nodes."""
_LIKE_SMS = 0.2
_USUAL_SMS: dict[TokenDispatcher, int] = {"deepep": 20, "hybrid_ep": 16}
"""Multiprocessors that a dispatcher's kernels take unless told otherwise (Megatron-Core)."""
"""Multiprocessors that differ by no more than this share from a plan's are taken to be as many."""
_UNITS = {"MiB": 2.0**20, "GiB": 2.0**30, "MB": 1e6, "GB": 1e9}
Row = Mapping[str, str]
_Price = Callable[[DevicePrices], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One time of a row, and its price.

    Args:
        in_step: whether the source measured it in a step, and not alone in a loop.
    """

    operation: str
    seconds: float
    price: _Price
    in_step: bool = False


def questions(row: Row, device: DevicePrices) -> Iterator[Question]:
    """Return what a row asks of the prices of its machine.

    Raises:
        ValueError: a plan has no price of it.
    """
    op = row["op"]
    if "low-latency" in op:
        raise ValueError("low-latency kernels are those of inference")
    if "kernel only" in op:
        raise ValueError("the kernel alone: the call with its copies is another row")
    readers: Mapping[str, Callable[[Row, DevicePrices], Iterator[Question]]] = {
        r"(NCCL )?(all_reduce|all_gather|sendrecv)|NCCL all-to-all|expert-DP|TP all-": _collectives,
        r"(MoE|DeepEP.*|HybridEP.*|UCCL.*) ?(dispatch|combine)": _transfers,
        r"one MoELayer": _layers,
        r"grouped GEMM|scaled_grouped_mm": _gemms,
        r"cuDNN SDPA|MLA cudnn": _attention,
    }
    for words, reader in readers.items():
        if re.match(words, op):
            return reader(row, device)
    if op.startswith("MoE layer"):
        raise ValueError("layers whose experts a token, tokens or shared experts are not printed")
    raise ValueError("kernels and calls whose sizes, or whose waits for others, are not printed")


def _collectives(row: Row, device: DevicePrices) -> Iterator[Question]:
    size = _bytes(row["shape_or_bytes"])
    if row["op"].startswith("expert-DP"):
        ops: tuple[CollectiveOp, ...] = ("reduce_scatter", "all_gather")
    else:
        word = re.search(r"all_?-?reduce|all_gather|sendrecv|all-to-all", row["op"])
        assert word is not None  # noqa: S101 - the reader was chosen by it
        ops = (_OPS[word[0]],)
    span = _span(row, ops[0], device)
    for op, rate in zip(ops, _rates(row) or [0.0] * len(ops), strict=True):
        share = (span.size - 1) / span.size * (2 if op == "all_reduce" else 1)
        passed = size * (1.0 if op == "send" else share)
        num_bytes = size / span.size if op == "all_gather" else size
        how = re.search(r"CollNet|NVLS|ring|inside training", row["op"])
        yield Question(
            operation=f"{op} {how[0] if how else ''}".strip(),
            seconds=_seconds(row["time"])[0] if row["time"] else passed / rate,
            price=lambda prices, op=op, num=num_bytes: prices.collective(op, span, num),  # type: ignore[misc]
        )


_OPS: Mapping[str, CollectiveOp] = {
    "all_reduce": "all_reduce", "all-reduce": "all_reduce", "all_gather": "all_gather",
    "sendrecv": "send", "all-to-all": "all_to_all",
}  # fmt: skip


def _span(row: Row, op: CollectiveOp, device: DevicePrices) -> RankSpan:
    if row["ranks"] == "4 nodes":
        return RankSpan(size=4, nodes=4)
    ranks = int(row["ranks"])
    if "split 4+4" in row["gpu"] or "one IB NIC" in row["gpu"]:
        return RankSpan(size=ranks, nodes=2)
    if op == "send":
        return RankSpan(size=2, nodes=1 if ranks <= device.per_node else 2)
    return device.span(ranks, 1)


def _transfers(row: Row, device: DevicePrices) -> Iterator[Question]:
    op, library, dispatcher = row["op"], *_library(row["op"])
    span = device.span(math.prod(map(int, row["ranks"].split("x"))), 1)
    _check_sms(row, library, dispatcher)
    words = re.search(r"(\d+) tokens, h(\d+), top(\d+)", row["shape_or_bytes"])
    tokens, width, top_k = map(int, words.groups()) if words else _DEEPSEEK
    local = re.search(r"(\d+) local experts", row["shape_or_bytes"])
    of_rank = int(local[1]) if local else round(_EXPERTS / span.size)
    is_grouped = not (local or "V2" in op or op.startswith("MoE"))
    limit = min(span.nodes, _MOST_GROUPS) if is_grouped else span.nodes
    experts = of_rank * span.size * limit // span.nodes
    copies = _distinct(limit if span.nodes > 1 else span.size, experts, top_k)
    layout = FoldedLayout(ep=span.size, dp=span.size, dispatcher=dispatcher)
    times, rates = _seconds(row["time"]), _rates(row)
    for at, (phase, share) in enumerate(_phases(op)):
        part = RoutedExperts(
            d_model=round(width * share), num_experts=of_rank * span.size, top_k=top_k, d_hidden=1,
            router=Router(score="softmax", parameters=1, num_groups=span.nodes, top_groups=limit),
        )  # fmt: skip
        if not times and math.isnan(rates[at]):
            continue
        sent = tokens * copies * width * share * ELEMENT
        across = "" if span.nodes == 1 else " between nodes"
        yield Question(
            operation=f"{library} {phase}{' fp8' if share < 1 else ''}{across}",
            seconds=times[at] if times else sent / rates[at],
            price=lambda prices, part=part, phase=phase: exchange_seconds(  # type: ignore[misc]
                prices, layout=layout, part=part, tokens=tokens, phase=phase
            ),
        )


_DEEPSEEK = (4096, 7168, 8)
"""Tokens, columns and experts a token of Table 7 of arXiv 2603.07685: taken to be DeepSeek-V3's."""


def _library(op: str) -> tuple[str, TokenDispatcher]:
    """Return the library, and the dispatcher that prices it: UCCL-EP has DeepEP's calls."""
    if "NCCL all-to-all" in op:
        return "NCCL", "all_to_all"
    if "HybridEP" in op:
        return "HybridEP", "hybrid_ep"
    if op.startswith("UCCL"):
        return "UCCL-EP", "deepep"
    return "DeepEP V2" if "V2" in op else "DeepEP", "deepep"


def _check_sms(row: Row, library: str, dispatcher: TokenDispatcher) -> None:
    """Raise ValueError for other numbers of multiprocessors than a plan's own; V2 needs fewer."""
    given = re.match(r"(\d+) SMs", row["notes"])
    usual = _USUAL_SMS.get(dispatcher, 0)
    if given and library != "DeepEP V2" and abs(int(given[1]) / usual - 1) > _LIKE_SMS:
        raise ValueError(f"{library} with other multiprocessors than its own {usual}")


def _phases(op: str) -> list[tuple[TransferPhase, float]]:
    """Return the phases of a row's figures in their order, and bytes over those of bfloat16."""
    if re.search(r"dispatch fp8 ?/ ?bf16, combine", op):
        return [("dispatch", _FP8), ("dispatch", 1.0), ("combine", 1.0)]
    if "dispatch/combine" in op:
        return [("dispatch", 1.0), ("combine", 1.0)]
    share = _FP8 if "fp8" in op else 1.0
    return [("dispatch" if "dispatch" in op else "combine", share)]


def _distinct(parts: int, experts: int, top_k: int) -> float:
    """Return the parts that so many different experts of all are on, on average."""
    outside = experts - experts // parts
    return parts * (1 - math.comb(outside, top_k) / math.comb(experts, top_k))


def _layers(row: Row, _: DevicePrices) -> Iterator[Question]:
    """Return the passes of Megatron's own layer, with balanced routing."""
    words = re.search(r"h(\d+) ffn(\d+) (\d+)e top(\d+)(?: shared(\d+))?", row["shape_or_bytes"])
    assert words is not None  # noqa: S101 - the source has two layers
    width, hidden, experts, top_k, shared = (int(word or 0) for word in words.groups())
    part = RoutedExperts(
        d_model=width, d_hidden=hidden, num_experts=experts, top_k=top_k,
        router=Router(score="softmax", parameters=width * experts),
        shared=DenseFfn(d_model=width, d_hidden=shared) if shared else None,
    )  # fmt: skip
    word, dtype = row["op"].split()[-2:]
    dispatchers: Mapping[str, TokenDispatcher] = {
        "alltoall": "all_to_all", "deepep": "deepep", "hybridep": "hybrid_ep"
    }  # fmt: skip
    job = TrainingJob(
        decoder=decoder_named("DeepSeek-V3"), world_size=8, global_batch=8, length=4096,
        dtype="fp8" if dtype == "fp8" else "bfloat16",
    )  # fmt: skip
    layout = FoldedLayout(dp=8, ep=8, dispatcher=dispatchers[word])

    def price(device: DevicePrices, *, backward: bool) -> float:
        prices = BlockPrices(job=job, layout=layout, device=device)
        times = prices.routed_times(part)
        both = times.compute + times.communication
        return both.backward if backward else both.forward

    for name, seconds, backward in zip(
        ("forward", "backward"), _seconds(row["time"]), (False, True), strict=True
    ):
        yield Question(
            operation=f"MoE layer {name}, {word} {dtype}", seconds=seconds,
            price=lambda device, backward=backward: price(device, backward=backward),  # type: ignore[misc]
        )  # fmt: skip


def _gemms(row: Row, _: DevicePrices) -> Iterator[Question]:
    sizes = [int(word) for word in re.findall(r"\d+", row["shape_or_bytes"])]
    every: tuple[EvenForm, ...] = get_args(EvenForm)
    if row["op"].startswith("grouped"):
        rows, d_out, d_in, groups = sizes
        asked = [("bf16 forward and backward", "bfloat16", every)]
        asked += [("mxfp8 forward and backward", "mxfp8", every)]
    else:
        rows, d_in, groups, d_out = sizes[0], sizes[1], sizes[2], sizes[4]
        forms = every[:1] if row["op"].endswith("forward") else every[1:]
        asked = [(f"mxfp8 {form}", "mxfp8", (form,)) for form in forms]
    for (name, dtype, forms), seconds in zip(asked, _seconds(row["time"]), strict=True):
        yield Question(
            operation=f"grouped GEMM {name}", seconds=seconds,
            price=lambda device, dtype=dtype, forms=forms: sum(  # type: ignore[misc]
                device.gemm(
                    form, rows=rows / groups, d_in=d_in, d_out=d_out, num_experts=groups,
                    dtype=dtype,
                )
                for form in forms
            ),
        )  # fmt: skip


def _attention(row: Row, _: DevicePrices) -> Iterator[Question]:
    """Return causal attention's core: MLA has queries of 192 columns and values of 128."""
    length = re.search(r"seq (\d+)", row["shape_or_bytes"])
    assert length is not None  # noqa: S101 - all of them say it
    tokens, is_mla, backward = int(length[1]), "MLA" in row["op"], "backward" in row["op"]
    heads, widths = (128, 192 + 128) if is_mla else (64, 128 + 128)
    macs = heads * widths * tokens**2 / 2
    if row["time"]:
        seconds = _seconds(row["time"])[0]
    else:
        seconds = (
            (5 if backward else 2) * macs / (float(row["bandwidth_or_rate"].split()[0]) * 1e12)
        )
    yield Question(
        operation=f"attention {'backward' if backward else 'forward'}", seconds=seconds,
        in_step=bool(row["time"]),
        price=lambda device: device.attention_core(
            macs, head_dim=widths / 2, length=tokens, backward=backward, has_flash2=False),
    )  # fmt: skip


def _bytes(text: str) -> float:
    match = re.search(r"([\d.]+) (MiB|GiB|MB|GB)", text)
    assert match is not None  # noqa: S101 - collectives have a size
    return float(match[1]) * _UNITS[match[2]]


def _rates(row: Row) -> list[float]:
    """Return the bandwidths of the call, "28.09 GB/s torch API; 34.0 GB/s kernel only"."""
    words = row["bandwidth_or_rate"].split(" GB/s")[0].split("/")
    return [_rate(word) for word in words if word.strip()]


def _rate(word: str) -> float:
    return math.nan if word.strip() == "-" else float(word) * 1e9


def _seconds(text: str) -> list[float]:
    """Return the times of "fwd 7.119 ms, bwd 10.483 ms", or of "43140.2 / 23867.0 us"."""
    unit = 1e-3 if "ms" in text else 1e-6
    return [float(word) * unit for word in re.findall(r"(?<![\d,])\d+\.?\d*(?![\d,])", text)]
