"""Reasons of a layout by their figures: each is there where it applies, and only there."""

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest

from moetune.domain.constraints import LayoutPins
from moetune.domain.layout import Layout
from moetune.domain.model_plan import Chunks, ModelMemory, Part, PartName
from moetune.domain.units import format_bytes
from moetune.solve.chunks.choose import ChunkChoice
from moetune.solve.chunks.time import ChunkTime
from moetune.solve.layer.operations import NOTHING
from moetune.solve.layout.candidates import Batching, Candidate
from moetune.solve.layout.choose import search_layouts
from moetune.solve.layout.infeasible import nothing_fits
from moetune.solve.layout.words import (
    binding_of,
    explain_chunks,
    explain_layout,
    explain_layout_loss,
    explain_unfit,
    name_layout,
    name_memory,
    name_setting,
    omission_warnings,
    runtime_warnings,
    seconds_by_binding,
)
from tests.solve.test_layout_plan import SMALL, question

FIGURES = re.compile(r"[+-]?\d[\d.]*(?: ?%| [mµ]?s\b| [KMG]iB)")
SETTING = Batching(sequences=1, num_micro_batches=1, zero=False, recompute=False)


@pytest.fixture(scope="module")
def candidates() -> tuple[Candidate, ...]:
    pins = LayoutPins(zero=False)
    _, found = search_layouts(question(model=SMALL, world_size=4, tokens=1024, pins=pins))
    return found.best


def part(name: PartName, seconds: float) -> Part:
    return Part(name=name, layer_seconds=0.0, forward_seconds=0.0, seconds=seconds, share=0.0)


def scaled(candidate: Candidate, seconds: float, *, recompute: bool = False) -> Candidate:
    """Return a candidate whose step takes so long."""
    return replace(
        candidate, gradients=NOTHING, optimizer=NOTHING, transfers=NOTHING,
        pipeline=replace(candidate.pipeline, seconds=seconds),
        setting=replace(candidate.setting, recompute=recompute),
    )  # fmt: skip


def test_a_setting_names_the_ways_it_takes() -> None:
    ways = ("zero", "offload", "recompute", "one_chunk")
    words = {}
    for chosen in itertools.product((False, True), repeat=4):
        given: dict[str, Any] = dict(zip(ways, chosen, strict=True))
        setting = replace(SETTING, **given)
        words[chosen] = name_setting(setting)
        assert len(words[chosen].split(", ")) == 1 + sum(chosen)
        for way, word in (("zero", "ZeRO"), ("offload", "host"), ("recompute", "recompute")):
            assert (word in words[chosen]) is getattr(setting, way)
    assert len(set(words.values())) == 16
    assert re.findall(r"\d+ [\w-]+", name_setting(SETTING)) == ["1 micro-batch", "1 sequence"]
    many = replace(SETTING, sequences=2, num_micro_batches=8)
    assert re.findall(r"\d+ [\w-]+", name_setting(many)) == ["8 micro-batches", "2 sequences"]


@pytest.mark.parametrize("way", ["recompute", "one_chunk", "offload", None])
def test_memory_binds_where_something_saves_it_else_the_largest_kind_of_work(
    candidates: tuple[Candidate, ...], way: str | None
) -> None:
    settings = replace(candidates[0].setting, recompute=False, one_chunk=False, offload=False)
    given: dict[str, Any] = {way: True} if way else {}
    setting = replace(settings, **given)
    parts = (part("experts", 1.0), part("gate", 1.0), part("gradients", 1.5))
    found = binding_of(replace(candidates[0], setting=setting), parts)
    assert found == ("memory" if way else "computation")
    assert seconds_by_binding(parts) == {"computation": 2.0, "gradients": 1.5}


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize(
    ("seconds", "figures"),
    [
        (1.0, []),
        (0.995, ["-0.5 %", "5 %"]),
        (1.25, ["+25.0 %", "300 ms"]),
        (2.0, ["+100.0 %", "300 ms"]),
    ],
)
def test_a_lost_layout_is_slower_by_the_work_that_it_has_most_more_of(
    candidates: tuple[Candidate, ...],
    seconds: float,
    figures: list[str],
    recompute: bool,  # noqa: FBT001 - a case
) -> None:
    best = scaled(candidates[0], 1.0)
    other = scaled(candidates[-1], seconds, recompute=recompute)
    text = explain_layout_loss(
        other=other, parts=(part("experts", 0.6), part("gradients", 0.3)),
        best=best, best_parts=(part("experts", 0.5), part("bubble", 9.0)),
    )  # fmt: skip
    assert FIGURES.findall(text) == figures
    assert ("recompute" in text) is (recompute and seconds > 1)


def test_a_layout_wins_by_its_two_largest_kinds_of_work_and_against_the_next(
    candidates: tuple[Candidate, ...],
) -> None:
    best, second = scaled(candidates[0], 1.0), scaled(candidates[1], 1.5)
    parts = (part("experts", 0.2), part("gate", 0.25), part("gradients", 0.4), part("bubble", 0.1))

    def figures(**changed: object) -> list[str]:
        given = {"best": best, "parts": parts, "binding": "gradients", "runner_up": second}
        return FIGURES.findall(explain_layout(**{**given, **changed}))  # type: ignore[arg-type]

    assert figures() == ["45 %", "40 %", "50.0 %"]
    assert figures(runner_up=None) == ["45 %", "40 %"]
    assert figures(parts=(part("experts", 0.5), part("bubble", 0.0))) == ["50 %", "50.0 %"]
    bound = [
        explain_layout(best=best, parts=parts, binding=binding, runner_up=second)
        for binding in ("memory", "gradients")
    ]  # fmt: skip
    assert bound[0].count(".") == bound[1].count(".") + 1  # one sentence more


def chunked(*, offload: bool, added: float, update: float, host_bytes: int = 2**30) -> ChunkChoice:
    memory = ModelMemory(
        parameter_bytes=0, gradient_bytes=0, optimizer_bytes=0, activation_bytes=0,
        buffer_bytes=0, total_bytes=0,
    )  # fmt: skip
    return ChunkChoice(
        chunks=Chunks(chunk_bytes=2**20, cache_bytes=2**22, scatter=True, offload=offload),
        num_chunks=7, num_places=4, num_gathers=9.5, gathered_bytes=2.0**21, reduced_bytes=2**23,
        time=ChunkTime(
            seconds=3.0, compute_seconds=2.0, transfer_seconds=1.5, optimizer_seconds=added,
            update_seconds=update,
        ),
        memory=memory, host_bytes=host_bytes, trust=NOTHING,
    )  # fmt: skip


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("added", [0.0, 0.25])
def test_chunks_are_explained_by_what_they_cost_and_where_they_live(
    num_micro_batches: int,
    offload: bool,  # noqa: FBT001 - a case
    added: float,
) -> None:
    choice = chunked(offload=offload, added=added, update=0.5)
    text = explain_chunks(choice, num_micro_batches=num_micro_batches)
    later = {1: ["250 ms"] if added else [], 2: ["500 ms"]}[num_micro_batches]
    host = ["1.00 GiB"] if offload else []
    assert FIGURES.findall(text) == [
        *host, "1.00 MiB", "4.00 MiB", "2.00 MiB", "8.00 MiB", "1.50 s", "1.00 s", *later,
    ]  # fmt: skip
    counts = re.findall(r"\b(?:7|4|9\.5)(?= )", text)
    assert counts == ["7", "4", "9.5"]  # chunks, places, gathers
    assert ("step_in_backward" in text) is (offload and num_micro_batches == 1)


def test_a_runtime_is_warned_of_each_feature_that_it_lacks() -> None:
    found = {
        ways: list(runtime_warnings(zero=ways[0], recompute=ways[1]))
        for ways in itertools.product((False, True), repeat=2)
    }
    assert [len(one) for one in found.values()] == [0, 1, 1, 1]
    (both,), (again,), (shards,) = found[True, True], found[False, True], found[True, False]
    assert ("recompute" in shards, "recompute" in again, "recompute" in both) == (False, True, True)
    assert ("shard" in shards, "shard" in again, "shard" in both) == (True, False, True)


def test_layouts_without_a_price_are_counted() -> None:
    no_sends = question(
        model=SMALL, world_size=4, tokens=1024, without=("send",), pins=LayoutPins(zero=False)
    )
    _, found = search_layouts(no_sends)
    assert found.unpriced
    total = len(found.best) + len(found.unfit) + len(found.unpriced)
    (text,) = omission_warnings(found.unpriced, total)
    assert re.findall(r"\d+", text)[:2] == [str(len(found.unpriced)), str(total)]
    assert list(omission_warnings((), total)) == []


def test_bytes_over_the_limit_and_each_part_are_named(candidates: tuple[Candidate, ...]) -> None:
    memory = ModelMemory(
        parameter_bytes=2**20, gradient_bytes=2**21, optimizer_bytes=2**22,
        activation_bytes=2**23, buffer_bytes=2**24, total_bytes=31 * 2**20,
    )  # fmt: skip
    parts = [format_bytes(2**power) for power in range(20, 25)]
    assert FIGURES.findall(name_memory(memory)) == parts
    assert FIGURES.findall(explain_unfit(memory, limit_bytes=30 * 2**20)) == ["1.00 MiB"]
    _, found = search_layouts(
        question(model=SMALL, world_size=4, tokens=1024, memory_bytes=80 * 2**20,
                 pins=LayoutPins(zero=False))
    )  # fmt: skip
    unfit = replace(found.unfit[0], memory=memory)
    assert candidates
    for host_bytes, known, shown in (
        (0, 2**30, []), (2**33, 2**30, ["8.00 GiB", "1.00 GiB"]), (2**33, None, []),
    ):  # fmt: skip
        error = nothing_fits(
            replace(unfit, host_bytes=host_bytes), limit_bytes=30 * 2**20, host_bytes=known, hint=""
        )
        assert FIGURES.findall(error.what) == [
            "31.0 MiB", *parts, "1.00 MiB", "30.0 MiB", *shown,
        ]  # fmt: skip


def test_a_layout_is_named_by_its_four_sizes_and_its_experts() -> None:
    layout = Layout(expert_parallel="all_to_all", dp=8, ep=4, tp=1, pp=2)
    assert name_layout(layout) == "dp 8 · ep 4 · tp 1 · pp 2 · all_to_all"
