"""In which group a point is shown while it is measured, and after the fit."""

from moetune.domain.cluster import Fingerprint, Machine
from moetune.domain.samples import AttentionPoint, CollectivePoint, RowsPoint, Sample
from moetune.fit.profile import fit_profile
from moetune.fit.quality import group_of, quality_of

TWO_NODES = Machine(kind="cpu", device="lab", num_devices=4, devices_per_node=2, memory_bytes=2**30)
ONE_NODE = Machine(kind="cpu", device="lab", num_devices=4, devices_per_node=4, memory_bytes=2**30)


def test_collectives_are_named_with_their_place_where_there_are_several_nodes() -> None:
    point = CollectivePoint(op="all_reduce", group_size=4, num_bytes=1024)
    assert group_of(point, TWO_NODES) == "all_reduce, 4 ranks on 2 nodes"
    assert group_of(point, ONE_NODE) == "all_reduce"
    attention = AttentionPoint(dtype="float32", num_sequences=1, length=8, num_heads=1, head_dim=8)
    assert group_of(attention, TWO_NODES) == "attention"
    assert group_of(RowsPoint(op="adam", dtype="float32", rows=8, width=1), ONE_NODE) == (
        "memory-bound operations"
    )


def test_each_place_is_judged_by_the_errors_of_its_fits() -> None:
    samples = [
        Sample(
            point=CollectivePoint(
                op="all_reduce", group_size=2, num_bytes=2**at, num_nodes=num_nodes
            ),
            seconds=(rate * 2**at * (1 + wave * (-1) ** at),) * 4,
        )
        for num_nodes, rate, wave in ((0, 1e-9, 0.0), (2, 1e-7, 0.2))
        for at in range(10, 20)
    ]
    profile = fit_profile(name="lab", machine=TWO_NODES, fingerprint=Fingerprint(), samples=samples)
    quality = quality_of(profile)
    assert quality is not None
    (across,) = quality.suspect
    assert across.group == "all_reduce, 2 ranks on 2 nodes"
    assert across.median_error is not None
    assert across.median_error > 0.1
