"""Pins that no layout obeys, against all layouts of a small job, and what is said of them."""

import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.errors import InputError
from moetune.domain.pipeline import read_stages
from moetune.domain.targets import find_target
from moetune.domain.training import FoldedLayout, LayoutRequest, TrainingJob
from moetune.huggingface.registry import named_model
from moetune.solve.model.pins import contradiction, nearest
from moetune.solve.model.space import LayoutSpace
from tests.solve.model.brute_force import OLMOE, every_layout, search_of

QWEN = named_model("qwen3-30b-a3b").decoder
SIZES = st.sampled_from([None, None, 1, 2, 3, 4])


@cache
def small(target: str) -> tuple[LayoutSpace, tuple[FoldedLayout, ...]]:
    """Return the space of a job on 4 ranks, and all of its layouts."""
    decoder = replace(OLMOE, blocks=OLMOE.blocks[:4])
    job = TrainingJob(decoder=decoder, world_size=4, global_batch=8, length=1024)
    search = search_of(job, target=target)
    plain = LayoutRequest(offload_activations=0.0, offload_optimizer=0.0)
    return search.space, tuple(every_layout(search, plain))


def agree(pins: LayoutRequest, names: Iterable[str], layouts: Iterable[FoldedLayout]) -> bool:
    """Return whether some layout has the pins of those names."""
    wanted = {name: getattr(pins, name) for name in names}
    return any(
        all(getattr(layout, name) == value for name, value in wanted.items()) for layout in layouts
    )


@settings(max_examples=60, deadline=None)
@given(
    target=st.sampled_from(["megatron", "torchtitan", "moetune", "deepspeed"]),
    pins=st.builds(
        LayoutRequest,
        tp=SIZES,
        pp=SIZES,
        ep=SIZES,
        micro_batch=SIZES,
        zero=st.sampled_from([None, None, 1, 2, 3]),
        overlap=st.sampled_from([None, None, "batch"]),
        recompute=st.sampled_from([None, None, ("full",)]),
    ),
)
def test_the_nearest_pins_agree_and_change_fewest(target: str, pins: LayoutRequest) -> None:
    space, layouts = small(target)
    fields: dict[str, Any] = {
        name: getattr(pins, name)
        for name in ("tp", "pp", "ep", "micro_batch", "recompute", "overlap", "zero")
        if getattr(pins, name) is not None
    }
    if agree(pins, fields, layouts):
        return
    near = nearest(space, pins)
    assert near is not None
    assert agree(near.pins, fields, layouts)
    changed = [name for name in fields if getattr(near.pins, name) != fields[name]]
    assert not any(
        agree(pins, {*fields} - {*fewer}, layouts)
        for fewer in itertools.combinations(fields, len(changed) - 1)
    ), "fewer changes would do"


@pytest.mark.parametrize(
    ("target", "pins", "what", "hint"),
    [
        ("megatron", LayoutRequest(tp=8, ep=3, pp=5),
         ("cp·tp·pp (40)", "; num_experts (128) does not divide by ep (3)"),
         "nearest that agree: --tp 8 --pp 4 --ep 4"),
        ("megatron", LayoutRequest(tp=4, pp=4, ep=32, micro_batch=1),
         ("ep·etp (32) does not divide dp·cp·tp (16)",),
         "nearest that agree: --tp 4 --pp 2 --ep 32 --micro-batch 1"),
        ("megatron", LayoutRequest(overlap="batch", recompute=("full",)),
         ("overlap batch with recomputation of full",),
         "nearest that agree: --recompute none --overlap batch"),
        ("megatron", LayoutRequest(pp=4, vpp=1, overlap="batch"), ("no virtual stages",),
         "nearest that agree: --pp 4 --vpp 2 --overlap batch"),
        ("transformers", LayoutRequest(pp=2, zero=1), ("cannot run pp 2", "; ", "ZeRO stage 1"),
         "nearest that agree: --pp 1 --zero 3"),
        ("megatron", LayoutRequest(stages=read_stages("Et*24|t*23L")), ("number 47",),
         "omit --stages 'Et*24|t*23L'"),
    ],
)  # fmt: skip
def test_broken_rules_are_named_together_with_the_nearest_pins_that_agree(
    target: str, pins: LayoutRequest, what: tuple[str, ...], hint: str
) -> None:
    job = TrainingJob(decoder=QWEN, world_size=64, global_batch=512, length=4096)
    error = contradiction(LayoutSpace(job=job, target=find_target(target)), pins)
    assert all(part in error.what for part in what), error.what
    assert error.hint == hint


def test_a_job_that_has_no_layout_is_explained_without_its_pins() -> None:
    job = TrainingJob(decoder=OLMOE, world_size=8, global_batch=7, length=2049)
    space = LayoutSpace(job=job, target=find_target("transformers"))
    assert nearest(space, LayoutRequest(tp=2)) is None
    error = contradiction(space, LayoutRequest(tp=2))
    assert isinstance(error, InputError)
    assert "global_batch" in error.what
