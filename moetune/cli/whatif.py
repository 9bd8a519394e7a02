"""`moetune whatif`: a plan, and the plan for changed inputs or another machine."""

from collections.abc import Sequence
from dataclasses import replace
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
from moetune.domain.errors import InputError
from moetune.domain.spelling import AS_FLAGS, about, parsed
from moetune.domain.units import parse_bytes, parse_count

_FLAGS = replace(AS_FLAGS, constraint="--constraint {}")
EPILOG = example("moetune whatif 3f9c21 --tokens 32k --speed communication=2")


def whatif(
    context: typer.Context,
    plan: PlanArgument,
    tokens: Annotated[
        str | None, typer.Option(help="Other tokens per rank and step, such as 32k.")
    ] = None,
    world_size: Annotated[
        int | None, typer.Option("--world-size", min=1, help="Another number of ranks.")
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Other memory of one device, such as 40GiB."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Another element type.")] = None,
    speed: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART=FACTOR",
            help="Speed of computation, communication or copies as a multiple of the measured one.",
        ),
    ] = None,
    constraint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FLAG=VALUE",
            help="Another flag of `moetune plan`, such as strategy=S4; strategy= removes it.",
        ),
    ] = None,
    model: TrainedModelOption = None,
    profile: ProfileOption = None,
    *,
    all_: All = False,
    json: Json = False,
) -> None:
    """Plan again with changes, and compare.

    The batch, the cluster, the speeds or any flag of `moetune plan` can change. Group sizes that
    were not measured are estimated, and the plan warns of it. Nothing is stored. Another --profile
    is another machine.
    """
    from moetune.app.files import find_plan
    from moetune.app.planner import local_planner
    from moetune.app.views.comparison import whatif_sections
    from moetune.app.whatif import WhatIf
    from moetune.app.whatif import whatif as answer_of

    session = session_of(context, all_rows=all_)
    sizes = {
        "tokens_per_rank": parsed(tokens, parse_count, "tokens"),
        "world_size": world_size,
        "memory_limit_bytes": parsed(memory_limit, parse_bytes, "memory_limit"),
        "dtype": dtype,
        "constraints": _constraints(constraint or ()),
    }
    changes = {name: value for name, value in sizes.items() if value not in (None, {})}
    question = WhatIf(changes=changes, speeds=dict(map(_speed, speed or ())), spelling=_FLAGS)
    wanted = find_plan(plan, stores=session.find_store)
    with local_planner(session.settings, profile=profile) as planner:
        answer = answer_of(planner, wanted, question, model=model)
    session.screen.answer(whatif_sections(answer), answer.document, as_json=json)


def _constraints(pairs: Sequence[str]) -> dict[str, str | None]:
    """Return flags and their values; None for a flag that is removed."""
    with about("constraint"):
        return {name.removeprefix("--"): value or None for name, value in map(_pair, pairs)}


def _speed(text: str) -> tuple[str, float]:
    with about("speed"):
        part, factor = _pair(text)
        try:
            return part, float(factor)
        except ValueError:
            what = f"{text!r} does not end in a number"
            raise InputError(what, "such as communication=2") from None


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise InputError(f"{text!r} is not NAME=VALUE", "such as communication=2")
    return name, value
