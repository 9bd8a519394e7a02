"""Measured costs: differences that nobody can measure decide for fewer chunks."""

from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.constraints import Bounds
from moetune.domain.layer import PHASES, LayerShape, Phase
from moetune.solve.layer.choose import NOISE, WORTH, DegreeChooser
from moetune.solve.layer.parallelism import AllToAllCosts
from tests.solve.costs_by_hand import LinearCosts

LAYER = LayerShape(d_model=512, d_hidden=1024, num_experts=8)


def chooser(*, is_measured: bool) -> DegreeChooser:
    costs = AllToAllCosts(
        layer=LAYER, world_size=8, dtype="float32", costs=LinearCosts(is_measured=is_measured)
    )
    return DegreeChooser(costs=costs, bounds=Bounds())


def saved_share(made: DegreeChooser, tokens: int) -> float:
    """Return the share of a step in one chunk that the best degrees save."""
    one_chunk = best = made.costs.overhead(tokens=tokens).seconds
    for phase in PHASES:
        seconds = [time.seconds for time in made.rank(phase, tokens)]
        one_chunk += made.time(phase, tokens, 1).seconds
        best += min(seconds)
    return 1 - best / one_chunk


@given(tokens=st.integers(1, 2**16), phase=st.sampled_from(("forward", "backward")))
def test_no_smaller_degree_is_within_noise_and_the_chosen_one_is_where_chunks_pay(
    tokens: int, phase: Phase
) -> None:
    made = chooser(is_measured=True)
    times = {time.degree: time.seconds for time in made.rank(phase, tokens)}
    limit = min(times.values()) * (1 + NOISE)

    chosen = made.degree(phase, tokens)

    if saved_share(made, tokens) < WORTH:
        assert chosen == 1
        return
    assert times[chosen] <= limit
    assert all(times[degree] > limit for degree in range(1, chosen))


def test_published_lines_are_taken_at_their_word() -> None:
    exact, careful = chooser(is_measured=False), chooser(is_measured=True)
    pairs = [
        (exact.degree("forward", 2**step), careful.degree("forward", 2**step)) for step in range(17)
    ]
    assert all(few <= many for many, few in pairs)
    assert any(few < many for many, few in pairs)
