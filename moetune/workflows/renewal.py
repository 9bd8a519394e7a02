"""Plans of layers for the number of ranks that a job has now, in place of those it had before."""

import logging
from collections.abc import Mapping, Sequence

from moetune.domain.document import canonical_json
from moetune.domain.errors import MoetuneError
from moetune.domain.plan import Plan
from moetune.runtime.plans.shared import FoundPlans
from moetune.workflows import wiring
from moetune.workflows.open_planner import local_planner
from moetune.workflows.served_plans import ask_service

_LOGGER = logging.getLogger("moetune")


def renewed(
    found: FoundPlans, *, url: str | None, num_ranks: int, db: str | None, observe_every: int
) -> FoundPlans:
    """Return plans for a number of ranks in place of those for others.

    The service gives them where there is one; else they are made from the store's profiles, and
    stored. A plan that cannot be had is one warning, and its layers run one chunk. Plans of whole
    models stay.

    Args:
        observe_every: as in `open_planbook`.
    """
    old = [one for one in found.plans if one.inputs.world_size != num_ranks]
    if not old:
        return found
    kept = [one for one in found.plans if one not in old]
    questions = [one.inputs.question_for(num_ranks) for one in old]
    if url is None:
        made = _made(questions, db)
        plans = (*kept, *made)
        is_complete = found.is_complete and len(made) == len(questions)
        return FoundPlans(plans=plans, is_complete=is_complete, reporter=found.reporter)
    reported = frozenset() if found.reporter is None else found.reporter.plan_ids
    return ask_service(
        url, [*(one.id for one in kept if one.id in reported), *questions],
        others=[one for one in kept if one.id not in reported],
        num_ranks=num_ranks, observe_every=observe_every,
    )  # fmt: skip


def _made(questions: Sequence[Mapping[str, object]], db: str | None) -> list[Plan]:
    """Return the plans that can be made here; the log says why others cannot."""
    made: list[Plan] = []
    settings = wiring.configure(db=db).settings
    for question in questions:
        try:
            with local_planner(settings, saves=True) as planner:
                made.append(planner.resolve(question))
        except MoetuneError as error:
            text = f"no plan for {canonical_json(question)}: {error}\n  its layers run one chunk"
            _LOGGER.warning(text)
    return made
