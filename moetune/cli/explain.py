"""`moetune explain`: the reasons of a plan, and why it is not another choice."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated

import typer

from moetune.cli.session import (
    All,
    Json,
    PlanArgument,
    ProfileOption,
    TrainedModelOption,
    example,
    session_of,
)

EPILOG = example("moetune explain 3f9c21 --degree 8")


def explain(
    context: typer.Context,
    plan: PlanArgument,
    degree: Annotated[
        int | None, typer.Option(min=1, help="Why not so many chunks, forward and backward?")
    ] = None,
    forward_degree: Annotated[
        int | None, typer.Option(min=1, help="Why not so many chunks forward?")
    ] = None,
    backward_degree: Annotated[
        int | None, typer.Option(min=1, help="Why not so many chunks backward?")
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(help="Why not keep activations that way: none, S1, S2, S3 or S4?"),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            help="Why not this layout of a whole model: tp=2,pp=4, or as a plan prints it?",
        ),
    ] = None,
    model: TrainedModelOption = None,
    profile: ProfileOption = None,
    *,
    all_: All = False,
    json: Json = False,
) -> None:
    """Explain a plan's choice and its times, or why it is not another one.

    Shows where its step and its memory go, the alternatives that lost, other batch sizes, and the
    uncertainty.
    With another choice: by how much it is slower, of what, and whether it fits and is allowed.
    """
    from moetune.app.files import find_plan
    from moetune.app.planner import local_planner
    from moetune.app.subjects import WhyNot
    from moetune.app.views.plan import explanation_sections, why_not_sections

    session = session_of(context, all_rows=all_)
    question = WhyNot(
        degree=degree, forward_degree=forward_degree, backward_degree=backward_degree,
        strategy=strategy, layout=layout,
    )  # fmt: skip
    wanted = find_plan(plan, stores=session.find_store)
    with local_planner(session.settings, profile=profile) as planner:
        if question.is_asked:
            answer = planner.why_not(wanted, question, model=model)
            document: Mapping[str, object] = answer.document
            view = partial(why_not_sections, answer)
        else:
            subject = planner.explain(wanted, model=model)
            document, view = subject.document, partial(explanation_sections, subject)
    if json:
        session.screen.document(document)
    else:
        session.screen.answer(view())
