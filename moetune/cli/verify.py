"""`moetune verify`: a plan's predictions against real steps of its layer on this machine."""

from typing import TYPE_CHECKING

from moetune import config
from moetune.cli.commands import AT_LEAST_1, command, option
from moetune.cli.options import OVERSUBSCRIBE, PLAN, PROFILE
from moetune.cli.session import Session
from moetune.domain.errors import QualityError

if TYPE_CHECKING:
    from moetune.app.verify import Verification
    from moetune.domain.plan import Plan


@command(
    "moetune verify 3f9c21 --nproc 2",
    PLAN,
    option("--nproc", "Ranks to start. Default: the plan's.", AT_LEAST_1),
    PROFILE,
    OVERSUBSCRIBE,
)
def verify(
    session: Session, plan: str, nproc: int | None, profile: str | None, *, oversubscribe: bool
) -> int:
    """Run a plan's layer and compare its times.

    Runs every degree, and compares outputs and gradients with those of one chunk. Exit code 6:
    the step is outside of its range, or one chunk is faster.
    """
    from moetune.app.staleness import stale_note
    from moetune.app.verify import verify_plan
    from moetune.app.views.observed import verification_sections

    environ = config.environment()
    made = session.plan(plan).as_layer()
    with session.planner(profile) as planner:
        machine = planner.explain(made).profile
    verification = verify_plan(
        made, profile=machine, num_ranks=nproc, launch=config.launch(environ), environ=environ,
        oversubscribe=oversubscribe,
    )  # fmt: skip
    if verification is None:
        return 0
    session.screen.answer(verification_sections(made, verification), verification.document)
    if machine is not None and (stale := stale_note(machine)):
        session.screen.note(stale)
    return _judge(session, made, verification)


def _judge(session: Session, made: "Plan", verification: "Verification") -> int:
    """Say whether the plan holds, and return the exit code; raise QualityError if it does not."""
    from moetune.app.views.observed import verdict

    words, hint = verdict(made, verification), "measure again, for longer:  moetune profile"
    if not verification.is_equal:
        hint = "this is a defect of moetune: report it with the output above"
    if session.as_json:  # one document is enough
        session.screen.note(words)
        return 0 if verification.holds else QualityError.exit_code
    if not verification.holds:
        raise QualityError(words, hint)
    session.screen.line(words)
    return 0
