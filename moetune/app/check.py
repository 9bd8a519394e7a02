"""A launch file checked on a profile's machine, and written with a change."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moetune.app.launch_check import Checked, check_launch
from moetune.app.planner import Planner
from moetune.domain.ask import LARGEST_RANKS
from moetune.domain.budget import Budget
from moetune.domain.errors import InputError
from moetune.domain.profile import Profile
from moetune.domain.records import ObservedRun
from moetune.domain.site import site_of
from moetune.domain.spelling import about
from moetune.domain.training_document import SCHEMA
from moetune.launches.files import LaunchFile, open_launch
from moetune.launches.reading import Asked
from moetune.report.section import plural


def check_file(
    planner: Planner, file: Path, text: str, asked: Asked, *, profile: str | None = None,
    budget: Budget | None = None,
) -> Checked:  # fmt: skip
    """Return the check of a launch file with that text, on a profile's machine.

    Args:
        profile: its name; None for the planner's own, or the default one.
        budget: of the whole training; None where nothing is asked of it.

    Raises:
        InputError: it is a plan or of an unknown kind, or something of it is missing.
        ProfileError: there is no such profile, or it lacks an operation.
    """
    if SCHEMA in text:
        raise InputError(
            f"{file} is a plan, and no launch",
            "`moetune explain` and `moetune observe` take plans; check what starts the run",
        )
    with about("profile"):
        machine = planner.sources.profile(profile, for_models=True).profile
    runs = planner.sources.observed_runs(machine)
    checked = planner.run(machine.name, checked_on, file, text, asked, machine, runs)
    return replace(checked, budget=budget)


def checked_on(
    file: Path, text: str, asked: Asked, profile: Profile, runs: Sequence[ObservedRun] = ()
) -> Checked:
    """Return the check of a launch file on a profile's machine, as of `check_file`.

    Args:
        runs: that were observed with the profile.
    """
    return check_launch(str(file), _opened(file, text, asked, profile), profile, runs)


def _opened(file: Path, text: str, asked: Asked, profile: Profile) -> LaunchFile:
    width = site_of(profile).devices_per_node
    try:
        launch = open_launch(file.name, text, replace(asked, devices_per_node=width))
    except RecursionError:
        raise InputError(f"{file} is nested too deeply", "give the file that starts") from None
    if (ranks := launch.reading.job.world_size) > LARGEST_RANKS:
        what = f"{file} starts {ranks:,} ranks, more than {LARGEST_RANKS:,}"
        raise InputError(what, "give its ranks with --world-size")
    return launch


def written_change(checked: Checked, text: str, asked: Asked, take: str) -> str:
    """Return a checked file's text with one of the changes, which is read again to prove it.

    Args:
        text: of the file, as it was checked.
        take: its number in `better`, or "best".

    Raises:
        InputError: there is no such change, or the file's lines cannot have it.
    """
    choices = {str(number): better for number, better in enumerate(checked.better, start=1)}
    if checked.best is not None:
        choices["best"] = checked.best
    if take not in choices:
        count = f"there {'is' if len(choices) == 1 else 'are'} {plural(len(choices), 'change')}"
        hint = f"{count}: use {' or '.join(choices)}" if choices else "nothing better is known"
        raise InputError(f"--take {take!r} is no change", hint)
    chosen, launch = choices[take], _opened(Path(checked.file), text, asked, checked.profile)
    text = launch.written(chosen.keys)
    again, wanted, site = launch.read_again(text), chosen.answer.layout, site_of(checked.profile)
    before = {problem.what for problem in checked.problems}
    stops = {problem.what for problem in again.problems(site) if problem.severity == "stops"}
    decoder = again.reading.decoder
    layouts = (  # of whole blocks
        layout.changed(offload_activations=layout.offloaded_share(decoder)).explicit(decoder)
        for layout in (again.reading.layout, wanted)
    )
    if len({*layouts}) > 1 or stops - before:
        raise InputError(
            "the file's lines cannot have this change", f"write it by hand: {chosen.change}"
        )
    return text
