"""A profile as measured on a machine whose times are known: lines with a little noise."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import get_args

import numpy as np

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.domain.cluster import Fingerprint, Machine
from moetune.domain.cost_keys import CostKey
from moetune.domain.costs import Costs, LinearCost
from moetune.domain.profile import Profile
from moetune.domain.samples import (
    CollectivePoint,
    CopyPoint,
    Direction,
    GemmForm,
    GemmPoint,
    InterferencePoint,
    Point,
    RowsPoint,
    Sample,
)
from moetune.fit.profile import fit_profile

MACHINE = Machine(
    kind="cuda", device="Lab GPU", num_devices=4, devices_per_node=4, memory_bytes=2**34
)
FINGERPRINT = Fingerprint(hardware={"device": "Lab GPU"}, software={"torch": "2.13"})
SHAPE = (512, 2048)
SIZES = tuple(2**at for at in range(14, 25, 2))


def measured_profile(*, name: str = "lab", noise: float = 0.02) -> Profile:
    """Return the profile of four ranks, with every operation that a layer has."""
    rng = np.random.default_rng(0)
    samples = [
        Sample(point=point, seconds=tuple((seconds * np.exp(noise * rng.normal(size=5))).tolist()))
        for point, seconds in _times()
    ]
    return replace(fitted(samples), name=name)


def _times() -> Iterator[tuple[Point, float]]:
    for form, rows, experts in product(get_args(GemmForm), (32, 128, 512, 2048), (1, 2, 4)):
        macs = experts * rows * SHAPE[0] * SHAPE[1]
        yield (
            GemmPoint(dtype="float32", product=form, num_experts=experts, rows=rows, d_in=SHAPE[0],
                      d_out=SHAPE[1]),
            2e-5 + macs * 2e-13,
        )  # fmt: skip
    for op, rows in product(("gelu", "gelu_backward", "gather", "scatter_add"), (64, 1024)):
        point = RowsPoint(op=op, dtype="float32", rows=rows, width=512)
        yield point, 5e-6 + rows * 512 * 1e-11
    for ranks, several, size in product((2, 4), (1, 4), SIZES):
        point_of_size = CollectivePoint(
            op="all_to_all", group_size=ranks, num_bytes=size, in_flight=several
        )
        yield point_of_size, 5e-5 + size * 4e-10
    for way, size in product(get_args(Direction), SIZES):
        yield CopyPoint(direction=way, pinned=True, num_bytes=size), 1e-5 + size * 1e-10
    yield InterferencePoint(victim="comp"), 1e-3
    yield InterferencePoint(victim="comm"), 2e-3
    yield InterferencePoint(victim="mem"), 1.5e-3
    yield InterferencePoint(victim="comp", others=("comm",)), 1.1e-3
    yield InterferencePoint(victim="comm", others=("comp",)), 2.6e-3
    yield InterferencePoint(victim="mem", others=("comp",)), 1.7e-3
    for size in (2**16, 2**20):
        yield InterferencePoint(victim="comp", others=("comm",), comm_bytes=size), 1.08e-3
        yield InterferencePoint(victim="comm", others=("comp",), comm_bytes=size), 6e-4


def fitted(samples: Iterable[Sample], machine: Machine = MACHINE, *, seed: int = 0) -> Profile:
    """Return the profile of samples."""
    return fit_profile(
        name="lab", machine=machine, fingerprint=FINGERPRINT, samples=samples, seed=seed
    )


@cache
def read(name: str) -> Profile:
    """Return a shipped profile."""
    return load_profile_file(bundled_profiles()[name])


def line_of(costs: Costs, key: CostKey) -> LinearCost:
    """Return the α–β line of an operation that has one."""
    alpha, large = costs.seconds(key, 0.0).seconds, 1e15
    beta = (costs.seconds(key, large).seconds - alpha) / large
    return LinearCost(alpha_seconds=alpha, beta_seconds=beta)
