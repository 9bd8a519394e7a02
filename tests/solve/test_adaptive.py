"""Algorithm 1's ranges against a table that remembers every size, monotone or not."""

from collections.abc import Mapping

from hypothesis import example, given
from hypothesis import strategies as st

from moetune.domain.plan import SAFE_DECISION, Decision
from moetune.solve.layer.online import REACH, AdaptiveRanges

SIZES = st.integers(1, 400)


chunks = SAFE_DECISION.with_degree
TABLES = st.dictionaries(SIZES, st.integers(1, 4).map(chunks))


def ranges(settled: Mapping[int, Decision], *, reach: float = 0.0) -> AdaptiveRanges:
    """Settle one after another, as a job does."""
    made = AdaptiveRanges(reach=reach)
    for tokens, decision in settled.items():
        made = made.settle(tokens, decision)
    return made


def looked_up_in_the_table(settled: Mapping[int, Decision], tokens: int) -> Decision | None:
    """What holds without any reach: the size itself, or two neighbours that agree."""
    below = [size for size in settled if size <= tokens]
    above = [size for size in settled if size >= tokens]
    if not below or not above or settled[max(below)] != settled[min(above)]:
        return None
    return settled[min(above)]


@given(settled=TABLES, tokens=SIZES)
def test_a_range_holds_exactly_between_neighbours_that_agree(
    settled: dict[int, Decision], tokens: int
) -> None:
    assert ranges(settled).decide(tokens) == looked_up_in_the_table(settled, tokens)


@given(settled=TABLES, reach=st.sampled_from([0.0, REACH, 0.5, 3.0]))
def test_every_settled_size_keeps_its_decision_whatever_the_truth(
    settled: dict[int, Decision], reach: float
) -> None:
    made = ranges(settled, reach=reach)
    for tokens, decision in settled.items():
        assert made.decide(tokens) == decision


@given(settled=TABLES, tokens=SIZES)
def test_reach_adds_answers_of_the_nearest_sizes_and_changes_none(
    settled: dict[int, Decision], tokens: int
) -> None:
    exact, wide = ranges(settled).decide(tokens), ranges(settled, reach=0.25).decide(tokens)
    if exact is not None:
        assert wide == exact
    elif wide is not None:
        near = [size for size in settled if max(size, tokens) <= 1.25 * min(size, tokens)]
        assert wide in [settled[size] for size in near]


@given(
    limits=st.lists(SIZES, max_size=4).map(sorted), sizes=st.lists(SIZES, unique=True), tokens=SIZES
)
def test_where_degrees_grow_ranges_tell_the_truth_and_gaps_contain_it(
    limits: list[int], sizes: list[int], tokens: int
) -> None:
    def truth(size: int) -> int:
        return 1 + sum(size >= limit for limit in limits)

    made = ranges({size: chunks(truth(size)) for size in sizes})
    decision = made.decide(tokens)
    assert made.violations == 0
    if decision is not None:
        assert decision.degree == truth(tokens)
    elif around := made.around(tokens):
        low, high = (settled.degree for settled in around)
        assert low <= truth(tokens) <= high


def test_a_range_does_not_swallow_another_degrees_sizes() -> None:
    """The printed algorithm widens the range of 2 to 10…1000, over that of 3."""
    made = ranges({10: chunks(2), 18: chunks(3), 1000: chunks(2)})
    decisions = [made.decide(tokens) for tokens in (10, 11, 18, 19, 1000)]
    assert decisions == [chunks(2), None, chunks(3), None, chunks(2)]
    assert made.violations == 1


def test_a_size_is_around_two_settled_sizes_or_beyond_all() -> None:
    made = ranges({10: chunks(5), 100: chunks(3)})
    assert made.around(50) == (chunks(5), chunks(3))
    assert made.around(101) == made.around(9) == ()


@given(sizes=st.lists(st.integers(1, 10**6), min_size=1, max_size=60))
@example(sizes=list(range(1000, 2000)))
def test_few_sizes_of_any_stream_have_to_be_searched(sizes: list[int]) -> None:
    made, searched = AdaptiveRanges(), []
    for tokens in sizes:
        if made.decide(tokens) is None:
            made = made.settle(tokens, chunks(tokens % 7 + 1))
            searched.append(tokens)
    for size in searched:
        near = [other for other in searched if size < other <= size * (1 + REACH)]
        assert len(near) <= 1
