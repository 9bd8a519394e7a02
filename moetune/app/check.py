"""Check of a launch, from a file or a text, on a profile's machine, and the file with a change."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from moetune.app.launch_check import Checked, LaunchCheck
from moetune.app.plan import LONGEST_NAME, profile_name, sound_numbers
from moetune.app.planner import Planner, ServicePlanner
from moetune.app.requests import check_served
from moetune.app.training_plan import calibration_for
from moetune.domain.any_plan import is_plan_text
from moetune.domain.ask import LARGEST_RANKS
from moetune.domain.budget import Budget
from moetune.domain.errors import InputError
from moetune.domain.profile import Profile
from moetune.domain.question import BUDGET_FIELDS, read_question
from moetune.domain.records import ObservedRun
from moetune.domain.site import site_of
from moetune.domain.spelling import AS_ARGUMENTS, about, spelled
from moetune.launches.files import open_launch, read_again
from moetune.launches.launch_file import Copy, LaunchFile
from moetune.launches.reading import Asked
from moetune.report.section import plural


def check_file(
    planner: Planner, file: Path, text: str, asked: Asked, *, profile: str | None = None,
    budget: Budget | None = None,
) -> Checked:  # fmt: skip
    """Return the check of a launch `file`, whose content is `text`, on a profile's machine.

    Args:
        profile: its name; None for the planner's profile, else the default profile.
        budget: tokens and price of the whole training; None if they are not asked for.

    Raises:
        InputError: the file is a plan, is of an unknown kind, or lacks something.
        ProfileError: there is no such profile, or it lacks an operation.
    """
    if is_plan_text(text):
        raise InputError(
            f"{file} is a plan, and no launch",
            "`moetune explain` takes plans; check what starts the run",
        )
    with about("profile"):
        machine = planner.sources.profile(profile, for_models=True).profile
    runs = planner.sources.observed_runs(machine)
    checked = planner.run(machine.name, checked_on, file, text, asked, machine, runs)
    return replace(checked, budget=budget)


def checked_on(
    file: Path, text: str, asked: Asked, profile: Profile, runs: Sequence[ObservedRun] = ()
) -> Checked:
    """Return the check of a launch file on a profile's machine; errors: see `check_file`."""
    launch = _opened(file, text, asked, profile)
    reading = launch.reading
    with sound_numbers(profile.name):
        calibration = calibration_for(runs, reading.job, reading.layout, reading.target)
        return LaunchCheck(str(file), launch, profile, calibration).checked()


def _opened(file: Path, text: str, asked: Asked, profile: Profile) -> LaunchFile:
    """Return the parsed launch; raise InputError for too deep nesting or too many ranks."""
    width = site_of(profile).devices_per_node
    try:
        launch = open_launch(file.name, text, replace(asked, devices_per_node=width))
    except RecursionError:
        raise InputError(f"{file} is nested too deeply", "give the file that starts") from None
    if (ranks := launch.reading.job.world_size) > LARGEST_RANKS:
        what = f"{file} starts {ranks:,} ranks, more than {LARGEST_RANKS:,}"
        raise InputError(what, "give its ranks with --world-size")
    return launch


def written_change(checked: Checked, text: str, asked: Asked, take: str) -> Copy:
    """Return a copy of a checked file with a change, after reading the copy again as a proof.

    Args:
        take: its number in `better`, or "best".

    Raises:
        InputError: there is no such change, or the file's lines cannot express it.
    """
    choices = {str(number): better for number, better in enumerate(checked.better, start=1)}
    if checked.best is not None:
        choices["best"] = checked.best
    if take not in choices:
        count = f"there {'is' if len(choices) == 1 else 'are'} {plural(len(choices), 'change')}"
        hint = f"{count}: use {' or '.join(choices)}" if choices else "nothing better is known"
        raise InputError(f"--take {take!r} is no change", hint)
    chosen, launch = choices[take], _opened(Path(checked.file), text, asked, checked.profile)
    copy = launch.written(chosen.keys)
    again, wanted = read_again(launch, copy), chosen.answer.layout
    before = {problem.what for problem in checked.problems}
    problems = again.problems(site_of(checked.profile))
    stops = [row for row in problems if row.severity == "stops" and row.what not in before]
    decoder = again.reading.decoder
    layouts = (  # of whole blocks
        layout.changed(offload_activations=layout.offloaded_share(decoder)).explicit(decoder)
        for layout in (again.reading.layout, wanted)
    )
    if stops:
        raise InputError(f"with this change {stops[0].what}", stops[0].fix)
    if len({*layouts}) > 1:
        raise InputError(
            "the file's lines cannot have this change", f"write it by hand: {chosen.change}"
        )
    return copy


_KINDS = (
    (".json", r"\A\s*\{"),
    (".py", r"(?m)^(?:import|from) \w"),
    (".toml", r"(?m)^\[[\w.-]+\]\s*$"),
    (".yaml", r"(?m)\A(?:\s*(?:#.*)?\n|---\n)*[\w-]+:(?:\s|$)"),
)
"""The file name's ending, and a pattern that only texts of such files match."""
ASKED = ("model", "world_size", "target", *BUDGET_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchText:
    """A launch file's text, and answers to what the file leaves open.

    Args:
        text: the file's content, which is read and never run.
        name: the file's name, whose ending says its kind; "" to infer the kind from the text.
        profile: name of the machine's profile; None for the default profile.
        model: a name that `moetune models list` has; None for the file's model.
        arguments: command-line arguments of the script.
        values: environment variables that the script reads.
        train_tokens: a number, or a text with a unit such as "1T".
        price, utilization: as in `moetune.plan`.
    """

    text: str
    name: str = ""
    profile: str | None = None
    model: str | None = None
    world_size: int | None = None
    target: str | None = None
    arguments: tuple[str, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    train_tokens: object = None
    price: float | None = None
    utilization: float | None = None


def check_text(planner: ServicePlanner, sent: LaunchText) -> Checked:
    """Return the check of a launch's text, without reading any file of this machine.

    Raises:
        InputError, ProfileError: those of `check_file`, or the text names a file.
        SolveLimitError: the check takes too long.
    """
    given = {name: value for name in ASKED if (value := getattr(sent, name)) is not None}
    with spelled(AS_ARGUMENTS):
        check_served(given)
        budget = read_question(given).budget
    if not sent.text.strip():
        raise InputError("there is no launch to check", "paste what starts the run", field="text")
    if len(sent.name) > LONGEST_NAME:
        raise InputError(f"name is longer than {LONGEST_NAME} characters", field="name")
    named = None if sent.profile is None else profile_name(sent.profile)
    asked = Asked(
        target=sent.target, model=sent.model, world_size=sent.world_size, extra=sent.arguments,
        values=sent.values, reads_files=False,
    )  # fmt: skip
    name = Path(Path(sent.name).name or name_of(sent.text))
    return check_file(planner, name, sent.text, asked, profile=named, budget=budget)


def name_of(text: str) -> str:
    """Return a file name for a pasted launch: "launch.sh" unless the text is of another kind."""
    if text.startswith("#!"):
        return "launch.sh"
    kinds = (ending for ending, look in _KINDS if re.search(look, text))
    return f"launch{next(kinds, '.sh')}"
