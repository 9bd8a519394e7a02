"""A check of a profile after its software changed: a few of its points measured again."""

from dataclasses import replace
from typing import TYPE_CHECKING

from moetune.domain.errors import InputError
from moetune.domain.profile import Profile
from moetune.domain.samples import Sample
from moetune.workflows.profile import take_part
from moetune.workflows.profile_request import MeasurementSetting, ProfileRequest, detect_cluster
from moetune.workflows.staleness import Check, check_points, judge_check

if TYPE_CHECKING:
    from moetune.measure.session import News
    from moetune.store import SqlStore

_BUDGET_SECONDS = 10.0


def check_profile(
    profile: Profile, setting: MeasurementSetting, *, store: "SqlStore | None"
) -> Check | None:
    """Measure a few of the profile's points again, on as many ranks as it has.

    Where they agree, the profile is stored again as one of the software that is installed now.

    Args:
        store: None on the ranks above 0 of a launch.

    Returns:
        None on the ranks above 0 of a launch.

    Raises:
        InputError: a published profile, or one of another machine or number of ranks.
        CollectiveError: a rank died.
    """
    from moetune.measure.session import Assignment
    from moetune.workflows.measuring import measure_on_ranks

    request = ProfileRequest(name=profile.name, num_ranks=profile.machine.num_devices)
    if store is None:
        take_part(request, setting)
        return None
    cluster = detect_cluster(request, setting)
    if cluster.fingerprint.hardware != profile.fingerprint.hardware:
        raise InputError(
            f"profile {profile.name!r} is not of this machine with "
            f"{cluster.machine.num_devices} ranks",
            "check it where it was measured, or measure this one:  moetune profile",
        )
    samples: list[Sample] = []

    def keep(news: "News") -> None:
        if isinstance(news, Sample):
            samples.append(news)

    measure_on_ranks(
        Assignment(
            needed=check_points(profile),
            preset="quick",
            ranks_per_node=profile.machine.devices_per_node,
            budget_seconds=_BUDGET_SECONDS,
        ),
        replace(setting, oversubscribe=True),  # as when it was measured
        num_ranks=request.num_ranks,
        on_news=keep,
    )
    check = judge_check(profile, samples)
    if check.verdict == "keep":
        software = cluster.fingerprint.software
        fingerprint = replace(profile.fingerprint, software=software)
        store.save_profile(replace(profile, fingerprint=fingerprint))
    return check
