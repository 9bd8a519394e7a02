"""The fastest layout: every one that fits into memory, at its best, in order of time."""

from collections.abc import Sequence

from moetune.domain.errors import ProfileError
from moetune.domain.plan_inputs import Layout
from moetune.solve.layout_candidates import Candidate, Found, Unfit
from moetune.solve.layout_trial import Search


def try_all(search: Search, layouts: Sequence[Layout]) -> Found:
    """Return every layout at its best."""
    best: list[Candidate] = []
    unfit: list[Unfit] = []
    unpriced: list[tuple[Layout, ProfileError]] = []
    for layout in layouts:
        trial = search.trial(layout)
        try:
            found = min(trial.candidates(), key=lambda one: one.order, default=None)
        except ProfileError as error:
            unpriced.append((layout, error))
            continue
        if found is None:
            unfit.append(trial.smallest())
        else:
            best.append(found)
    return Found(
        best=tuple(sorted(best, key=lambda one: one.order)),
        unfit=tuple(sorted(unfit, key=lambda one: one.memory.total_bytes)),
        unpriced=tuple(unpriced),
    )
