"""A measured machine and plans for it, all made up but of one piece."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from moetune.app.plan import make_plan
from moetune.domain.cluster import Fingerprint, Machine
from moetune.domain.document import encode
from moetune.domain.layer import LayerShape
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.question import Question
from moetune.domain.samples import (
    CollectivePoint,
    CopyPoint,
    GemmForm,
    GemmPoint,
    InterferencePoint,
    Point,
    ResourceClass,
    RowsPoint,
    Sample,
)
from moetune.fit.profile import fit_profile
from moetune.store import open_store

MACHINE = Machine(
    kind="cuda", device="Lab GPU", num_devices=8, devices_per_node=4, memory_bytes=2**30
)
LAYER = LayerShape(d_model=512, d_hidden=2048, num_experts=8)
_BLOCKS = 12
_PRODUCTS: tuple[GemmForm, ...] = ("forward", "grad_input", "grad_weight")


@cache
def lab_profile(name: str = "lab", *, slower: float = 1.0) -> Profile:
    """Return a measured profile; `slower` than the first lab by that factor on the link."""
    fingerprint = Fingerprint(
        hardware={"device": "Lab GPU", "cores": "64"}, software={"torch": "2.13", "nccl": "2.27"}
    )
    return fit_profile(
        name=name, machine=MACHINE, fingerprint=fingerprint, samples=tuple(_samples(slower))
    )


@cache
def lab_plan(tokens: int = 4096, *, memory_limit_bytes: int | None = None) -> Plan:
    """Return a plan for the lab."""
    request = Question(
        **encode(LAYER), tokens=tokens, dtype="float32", memory_limit=memory_limit_bytes,
        max_degree=8,
    )  # fmt: skip
    return make_plan(request, profile=lab_profile())


def fill(file: Path) -> tuple[Plan, Plan]:
    """Make a database with two profiles and two plans."""
    plans = lab_plan(), lab_plan(memory_limit_bytes=120 * 2**20)
    with open_store(str(file)) as store:
        store.save_profile(lab_profile())
        store.save_profile(lab_profile("lab-after", slower=1.3))
        for plan in plans:
            store.save_plan(plan)
    return plans


def _samples(slower: float) -> Iterator[Sample]:
    """Yield a line for each operation, with 2 % of noise."""
    rng = np.random.default_rng(7)
    for point, seconds in (*_exchanges(slower), *_products(), *_copies(), *_rows(), *_overlaps()):
        noise = np.exp(0.02 * rng.normal(size=_BLOCKS))
        yield Sample(point=point, seconds=tuple((seconds * noise).tolist()))


def _exchanges(slower: float) -> Iterator[tuple[Point, float]]:
    for ranks in (2, 8):
        for in_flight in (1, 4):
            for size in (2**power for power in range(12, 27, 2)):
                point = CollectivePoint(
                    op="all_to_all", group_size=ranks, num_bytes=size, in_flight=in_flight
                )
                yield point, slower * (6e-5 / in_flight + size * 2.2e-10)


def _products() -> Iterator[tuple[Point, float]]:
    for product in _PRODUCTS:
        for d_in, d_out in ((512, 2048), (2048, 512)):
            for rows in (2**power for power in range(5, 14, 2)):
                gemm = GemmPoint(
                    dtype="float32", product=product, rows=rows, d_in=d_in, d_out=d_out
                )
                yield gemm, 2e-5 + gemm.macs * 1.4e-13


def _copies() -> Iterator[tuple[Point, float]]:
    for direction in ("h2d", "d2h"):
        for both in (False, True):
            for size in (2**power for power in range(14, 27, 4)):
                copy = CopyPoint(direction=direction, pinned=True, num_bytes=size, both_ways=both)
                yield copy, 1e-5 + size * 5e-11 * (1.4 if both else 1.0)


def _rows() -> Iterator[tuple[Point, float]]:
    for op in ("gelu", "gelu_backward", "gather", "scatter_add"):
        for rows in (64, 512, 4096, 32768):
            yield RowsPoint(op=op, dtype="float32", rows=rows, width=512), 4e-6 + rows * 2e-9


def _overlaps() -> Iterator[tuple[InterferencePoint, float]]:
    classes: tuple[ResourceClass, ...] = ("comp", "comm", "mem")
    speeds = {"comp": 0.95, "comm": 0.82, "mem": 0.7}
    for victim in classes:
        others = tuple(name for name in classes if name != victim)
        yield InterferencePoint(victim=victim), 1e-3
        for name in others:
            yield InterferencePoint(victim=victim, others=(name,)), 1e-3 / speeds[victim]
        yield InterferencePoint(victim=victim, others=others), 1e-3 / speeds[victim] ** 2
