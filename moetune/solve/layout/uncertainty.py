"""Uncertainty of a whole model's layout, timed with the best others under each refit."""

from collections.abc import Sequence
from dataclasses import replace

from moetune.domain.costs import Costs, ModelError
from moetune.domain.model_plan import Confidence
from moetune.solve.layer.choose import HOPELESS
from moetune.solve.layer.model_error import ErrorDraws
from moetune.solve.layer.uncertainty import confidence_of
from moetune.solve.layout.candidates import Candidate
from moetune.solve.layout.search import LayoutSearch
from moetune.solve.layout.words import name_layout

NO_ERROR = ModelError()
NUM_CONTENDERS = 5
"""Most other layouts that are timed under every refit."""
NUM_REFITS = 50
"""Refits that a layout is timed under, of those there are: pricing one takes as long as searching
many layouts, and a plan should not take more than about twice as long for its range."""


def judge_layout(
    search: LayoutSearch,
    best: Sequence[Candidate],
    resamples: Sequence[Costs],
    error: ModelError = NO_ERROR,
) -> Confidence:
    """Compare the chosen layout with its contenders under each refit.

    A contender is the best candidate of another layout, with its micro-batches, degrees and
    chunks as they are: decisions do not follow a refit.

    Args:
        best: of each layout that fits, the fastest candidate; the chosen one first.
        resamples: without any, the nominal costs count as certain.
        error: of the steps, besides that of the costs.
    """
    limit_seconds = best[0].seconds * HOPELESS
    contenders = [one for one in best[: NUM_CONTENDERS + 1] if one.seconds <= limit_seconds]
    refits = resamples[:NUM_REFITS] or (search.prices.costs,)
    draws = ErrorDraws(error, num=len(refits))
    named = [(one, name_layout(one.layout)) for one in contenders]
    found = []
    for draw, costs in enumerate(refits):
        times = [
            timed_under(search, one, costs).seconds * draws.own(name, draw) for one, name in named
        ]
        found.append((draws.common(draw) * times[0], draws.common(draw) * min(times)))
    return confidence_of(found)


def timed_under(search: LayoutSearch, one: Candidate, costs: Costs) -> Candidate:
    """Return the candidate with its decisions, timed under other costs."""
    prices = search.prices.under(costs, degrees=one.priced.moe.step.degrees)
    return replace(search, prices=prices).trial(one.layout).timed_again(one)
