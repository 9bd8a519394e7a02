"""`moetune explain` and `moetune sensitivity`: a plan's reasons, and what its step depends on."""

from functools import partial

from moetune.cli.commands import ALL, AT_LEAST_1, command, option
from moetune.cli.options import MODEL, PLAN, PROFILE
from moetune.cli.session import Session


@command(
    "moetune explain 3f9c21 --degree 8",
    PLAN,
    option("--degree", "Why not so many chunks, forward and backward?", AT_LEAST_1),
    option("--strategy", "Why not keep activations that way: none, S1, S2, S3 or S4?"),
    option(
        "--layout",
        "Why not this layout of a whole model: tp=2,pp=4, or as a plan prints it?",
        form="SIZES",
    ),
    MODEL,
    PROFILE,
    ALL,
)
def explain(
    session: Session, plan: str, model: str | None, profile: str | None, **choice: str | int | None
) -> None:
    """Explain a plan's choice and its times, or why it is not another plan.

    Shows where its step and its memory go, the alternatives that lost, other batch sizes, and the
    uncertainty.
    With another choice: by how much it is slower, of what, and whether it fits and is allowed.
    """
    from moetune.app.subjects import WhyNot
    from moetune.app.views.plan import explanation_sections, why_not_sections

    question, wanted = WhyNot(**choice), session.plan(plan)  # type: ignore[arg-type] # as declared
    with session.planner(profile) as planner:
        if question.is_asked:
            answer = planner.why_not(wanted, question, model=model)
            session.screen.show(answer.document, partial(why_not_sections, answer))
        else:
            subject = planner.explain(wanted, model=model)
            session.screen.show(subject.document, partial(explanation_sections, subject))


@command("moetune sensitivity 3f9c21", PLAN, MODEL, PROFILE)
def sensitivity(session: Session, plan: str, model: str | None, profile: str | None) -> None:
    """Say which part of the machine and which decision a plan's step follows.

    Each part is made 1 % slower and faster with the plan's choice held fixed; each decision is
    moved to its neighbours. Nothing is stored.
    """
    from moetune.app.views.plan import sensitivity_sections

    wanted = session.plan(plan)
    with session.planner(profile) as planner:
        answer = planner.sensitivity(wanted, model=model)
    session.screen.show(answer.document, partial(sensitivity_sections, answer))
