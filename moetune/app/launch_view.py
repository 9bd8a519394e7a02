"""`moetune.check`: a launch file checked, for programs and notebooks."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moetune.app import wiring
from moetune.app.check import check_file
from moetune.app.notebook import AnswerView
from moetune.app.planner import local_planner
from moetune.app.views.check import check_document, check_sections
from moetune.domain.profile import Profile
from moetune.domain.question import read_question
from moetune.domain.spelling import AS_ARGUMENTS, spelled
from moetune.launches.files import launch_text
from moetune.launches.reading import Asked


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckView(AnswerView):
    """A checked launch, as `moetune check` prints it.

    Args:
        starts: whether the launch starts as it is, and fits.
    """

    starts: bool


def check(
    file: str | os.PathLike[str],
    *extra: str,
    profile: str | Profile | None = None,
    db: str | None = None,
    model: str | None = None,
    world_size: int | None = None,
    target: str | None = None,
    values: Mapping[str, str] | None = None,
    **budget: object,
) -> CheckView:
    """Return what a launch file runs, what stops it, and what would be better.

    The file is read, as `moetune check` does, and never run.

    Args:
        extra: words behind `--`: arguments of the script, or the function of a program.
        profile: the machine's profile; default, the setting, else the newest measured profile.
        db: the store; default, the store of the command line.
        model: a name or a `config.json`; default, the file's model.
        world_size: ranks; default, the launcher's number.
        target: the runtime's version, such as "megatron@0.17"; default, the newest version.
        values: environment variables that the script reads.
        budget: `train_tokens`, `price` and `utilization`, as in `moetune plan`.

    Raises:
        InputError: the file is of an unknown kind, or lacks something or has wrong values.
        ProfileError: there is no such profile, or it lacks an operation.
    """
    asked = Asked(
        target=target, model=model, world_size=world_size, extra=extra,
        values=dict(values or {}), folder=Path(file).parent,
    )  # fmt: skip
    with spelled(AS_ARGUMENTS):
        run, text = read_question(budget).budget, launch_text(Path(file))
        with local_planner(wiring.configure(db=db).settings, profile=profile) as planner:
            checked = check_file(planner, Path(file), text, asked, budget=run)
    return CheckView(
        name="check", sections=tuple(check_sections(checked)), document=check_document(checked),
        starts=checked.starts,
    )  # fmt: skip
