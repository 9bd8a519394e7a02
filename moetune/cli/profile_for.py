"""`moetune profile --for PLAN`: measure what the plan is least sure of, and plan again."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import typer

from moetune.cli.progress import ScreenProgress, clock
from moetune.cli.session import Session, command_again
from moetune.domain.errors import InputError
from moetune.measure.grid import Preset
from moetune.workflows import wiring
from moetune.workflows.profile_quality import not_measured

if TYPE_CHECKING:
    from moetune.domain.plan import Plan
    from moetune.domain.profile import Profile
    from moetune.workflows.profile_request import MeasurementSetting, ProfileRequest
    from moetune.workflows.worth import PlanWorth

INTERRUPTED = 130


def check_flags(given: Mapping[str, object]) -> None:
    """Raise InputError where one of these flags was given: the plan answers them."""
    used = [flag for flag, value in given.items() if value]
    if used:
        raise InputError(
            f"{used[0]} does not apply with --for: the plan and its profile say what is measured",
            "omit it; --budget, --preset, --plan-only and --json apply",
        )


def profile_for(
    session: Session,
    wanted: str,
    setting: "MeasurementSetting",
    *,
    preset: Preset,
    budget_seconds: float | None,
    plan_only: bool,
    as_json: bool,
) -> None:
    """Say what is worth measuring for a plan, measure it, and say what changed.

    Args:
        wanted: a plan's file, or the beginning of an id in the store.
    """
    from moetune.workflows.profile import take_part
    from moetune.workflows.profile_for import for_document, request_for
    from moetune.workflows.profile_request import ProfileRequest
    from moetune.workflows.views.worth import worth_section
    from moetune.workflows.worth import find_worth

    if setting.launch is not None and not setting.is_writer:
        take_part(ProfileRequest(preset=preset, num_ranks=setting.launch.world_size), setting)
        return
    plan, profile = _find(session, wanted, setting)
    worth = find_worth(plan, profile=profile)
    request = request_for(profile, worth, preset=preset, budget_seconds=budget_seconds)
    if not as_json:
        session.screen.answer([worth_section(plan, worth)])
    if worth.groups:
        act = _estimate if plan_only else _measure
        act(session, plan, worth, request, setting, as_json=as_json)
        return
    if setting.launch is not None:
        take_part(request, setting)  # the other ranks wait for points
    if as_json:
        session.screen.document(for_document(plan, worth, seconds=None, improved=None))


def _find(session: Session, wanted: str, setting: "MeasurementSetting") -> tuple["Plan", "Profile"]:
    """Return the plan and its profile, which is one of this machine."""
    from moetune.workflows.open_planner import local_planner
    from moetune.workflows.profile_for import check_machine
    from moetune.workflows.profile_request import ProfileRequest, detect_cluster

    with local_planner(session.settings) as planner:
        plan = planner.plan(wanted)
        profile = planner.profile_behind(plan)
    if profile.provenance == "measured":
        request = ProfileRequest(name=profile.name, num_ranks=profile.machine.num_devices)
        check_machine(profile, detect_cluster(request, setting))
    return plan, profile


def _estimate(
    session: Session,
    plan: "Plan",
    worth: "PlanWorth",
    request: "ProfileRequest",
    setting: "MeasurementSetting",
    *,
    as_json: bool,
) -> None:
    from moetune.measure.schedule import NUM_VISITS
    from moetune.workflows.profile import estimate_profile
    from moetune.workflows.profile_for import for_document

    with wiring.find_store(session.settings) as store:
        estimates = estimate_profile(request, setting, store=store)
    seconds = NUM_VISITS * sum(estimates.values())
    if as_json:
        session.screen.document(for_document(plan, worth, seconds=seconds, improved=None))
    else:
        session.screen.say(f"{len(estimates)} points, about {clock(seconds)}")


def _measure(
    session: Session,
    plan: "Plan",
    worth: "PlanWorth",
    request: "ProfileRequest",
    setting: "MeasurementSetting",
    *,
    as_json: bool,
) -> None:
    from moetune.workflows.profile_for import for_document, improve_plan
    from moetune.workflows.views.worth import improved_section

    screen = session.screen
    progress = ScreenProgress(screen, resume=command_again(session))
    with wiring.open_store(session.settings) as store:
        try:
            improved = improve_plan(plan, request, setting, store=store, progress=progress)
        except KeyboardInterrupt:
            progress.finish(())
            screen.note(
                f"interrupted: {progress.num_done} of {progress.num_points} points are stored, "
                "and the profile is as it was\n"
                f"  measure the rest:  moetune profile --for {plan.id[:6]}"
            )
            raise typer.Exit(INTERRUPTED) from None
    if as_json:
        seconds = progress.seconds
        screen.document(for_document(plan, worth, seconds=seconds, improved=improved))
        return
    screen.say()
    screen.answer([improved_section(improved)])
    for sample in improved.outcome.failed[:3]:
        screen.say(f"Not measured: {not_measured(sample, improved.outcome.profile.machine)}")
    screen.line(f"See it:        moetune explain {improved.after.id[:6]}")
