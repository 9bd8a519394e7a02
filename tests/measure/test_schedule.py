"""The order of a session's visits: needed ends first, each kind before any is refined."""

from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.samples import CopyPoint, GemmPoint, Point, RowsPoint, Sample
from moetune.measure.schedule import round_of, tiers
from moetune.measure.sizes import family


def gemm(rows: int) -> GemmPoint:
    return GemmPoint(dtype="float32", rows=rows, d_in=8, d_out=8)


def gather(rows: int) -> RowsPoint:
    return RowsPoint(op="gather", dtype="float32", rows=rows, width=8)


def copy(num_bytes: int) -> CopyPoint:
    return CopyPoint(direction="h2d", pinned=True, num_bytes=num_bytes)


NEEDED: tuple[Point, ...] = (*map(gemm, (1, 2, 4, 8, 16)), *map(gather, (1, 4)))
OTHERS: tuple[Point, ...] = (*map(gemm, (2, 3)), *map(copy, (64, 128, 256)))


def test_needed_ends_come_first_then_their_middle_and_other_kinds() -> None:
    first, second, third, *rest = tiers(NEEDED, OTHERS)
    assert set(first) == {gemm(1), gemm(16), gather(1), gather(4)}
    assert set(second) == {gemm(4)}
    assert set(third) == {gemm(2), gemm(8), copy(64), copy(256)}
    assert [set(tier) for tier in rest] == [{gemm(3), copy(128)}]


families = st.lists(
    st.one_of(
        st.integers(1, 40).map(gemm), st.integers(1, 40).map(gather), st.integers(1, 40).map(copy)
    ),
    unique=True,
    min_size=1,
)


@given(families, families)
def test_every_point_is_in_one_tier_and_no_kind_is_refined_before_its_ends(
    needed: list[Point], others: list[Point]
) -> None:
    by_worth = tiers(needed, others)
    assert all(by_worth)
    flat = [point for tier in by_worth for point in tier]
    assert sorted(map(repr, flat)) == sorted(map(repr, {*needed, *others}))
    seen: dict[object, list[int]] = {}
    for tier in by_worth:
        for point in tier:
            of_kind = seen.setdefault(family(point), [])
            of_kind.append(int(str(size_of(point))))
    for kind, sizes in seen.items():
        wanted = [size_of(point) for point in needed if family(point) == kind]
        ends = {min(wanted), max(wanted)} if wanted else {min(sizes), max(sizes)}
        assert set(sizes[: len(ends)]) == ends


def size_of(point: Point) -> int:
    return point.num_bytes if isinstance(point, CopyPoint) else point.rows  # type: ignore[union-attr] # of these three kinds


@given(families, families, st.integers(0, 8), st.integers(0, 99))
def test_a_round_has_the_next_tier_and_then_all_before_it(
    needed: list[Point], others: list[Point], number: int, seed: int
) -> None:
    by_worth = tiers(needed, others)
    new, again = round_of(by_worth, number, seed)
    assert (new, again) == round_of(by_worth, number, seed)
    assert set(new) == set(by_worth[number] if number < len(by_worth) else ())
    before = [point for tier in by_worth[:number] for point in tier]
    assert sorted(map(repr, again)) == sorted(map(repr, before))


def test_rounds_have_different_orders() -> None:
    by_worth = tiers([gemm(rows) for rows in range(1, 30)], ())
    late = len(by_worth)
    assert len({round_of(by_worth, late + number, 7) for number in range(4)}) == 4
    assert round_of(by_worth, late, 7) != round_of(by_worth, late, 8)


@given(families, st.integers(0, 5))
def test_kinds_take_turns_so_a_short_session_has_all(points: list[Point], seed: int) -> None:
    first, _ = round_of([points], 0, seed)
    assert sorted(map(repr, first)) == sorted(map(repr, points))
    kinds = {point.kind for point in points}
    assert {point.kind for point in first[: 4 + len(kinds)]} == kinds


@given(families, st.integers(0, 5))
def test_a_session_that_ends_early_has_the_largest_sizes(points: list[Point], seed: int) -> None:
    first, _ = round_of([points], 0, seed)
    for number in range(1, len(first) + 1):
        visited = first[:number]
        for kind in {family(point) for point in visited}:
            sizes = [size_of(point) for point in visited if family(point) == kind]
            assert max(sizes) == max(size_of(point) for point in points if family(point) == kind)


def visits(rows: int, *seconds: float) -> tuple[Point, list[Sample]]:
    return gemm(rows), [Sample(point=gemm(rows), seconds=(value,)) for value in seconds]
