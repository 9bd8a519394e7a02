"""`moetune whatif`: a plan, and the plan for changed inputs or another machine."""

from collections.abc import Sequence
from dataclasses import replace

from moetune.cli.commands import ALL, AT_LEAST_1, command, option
from moetune.cli.options import MODEL, PLAN, PROFILE, pair
from moetune.cli.session import Session
from moetune.domain.errors import InputError
from moetune.domain.spelling import AS_FLAGS
from moetune.domain.units import parse_bytes, parse_count

_FLAGS = replace(AS_FLAGS, constraint="--constraint {}")


def _speed(text: str) -> tuple[str, float]:
    part, factor = pair(text)
    try:
        return part, float(factor)
    except ValueError:
        what = f"{text!r} does not end in a number"
        raise InputError(what, "such as communication=2") from None


@command(
    "moetune whatif 3f9c21 --tokens 32k --speed communication=2",
    PLAN,
    option("--tokens tokens_per_rank", "Other tokens per rank and step, such as 32k.", parse_count),
    option("--world-size", "Another number of ranks.", AT_LEAST_1),
    option(
        "--memory-limit memory_limit_bytes",
        "Other memory of one device, such as 40GiB.",
        parse_bytes,
    ),
    option("--dtype", "Another element type."),
    option(
        "--speed",
        "Speed of computation, communication or copies as a multiple of the measured speed.",
        _speed,
        form="PART=FACTOR",
        multiple=True,
    ),
    option(
        "--constraint",
        "Another flag of `moetune plan`, such as strategy=S4; strategy= removes it.",
        pair,
        form="FLAG=VALUE",
        multiple=True,
    ),
    MODEL,
    PROFILE,
    ALL,
)
def whatif(
    session: Session,
    plan: str,
    speed: Sequence[tuple[str, float]],
    constraint: Sequence[tuple[str, str]],
    model: str | None,
    profile: str | None,
    **sizes: str | int | None,
) -> None:
    """Plan again with changes, and compare.

    The batch, the cluster, the speeds or any flag of `moetune plan` can change. Group sizes that
    were not measured are estimated, and the plan warns of it. Nothing is stored. Another --profile
    is another machine.
    """
    from moetune.app.views.comparison import whatif_sections
    from moetune.app.whatif import WhatIf
    from moetune.app.whatif import whatif as answer_of

    flags: dict[str, object] = {name: size for name, size in sizes.items() if size is not None}
    flags |= {name.removeprefix("--"): value or None for name, value in constraint}
    question = WhatIf(changes=flags, speeds=dict(speed), spelling=_FLAGS)
    wanted = session.plan(plan)
    with session.planner(profile) as planner:
        answer = answer_of(planner, wanted, question, model=model)
    session.screen.answer(whatif_sections(answer), answer.document)
