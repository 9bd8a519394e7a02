"""Look-up, list, import and removal of profiles in files, the store and the package."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from moetune.app.files import bundled_profiles, load_profile_file, reference_profile
from moetune.app.wiring import StoreFinder
from moetune.domain.errors import MoetuneError, ProfileError
from moetune.domain.profile import Profile, Provenance
from moetune.domain.records import RunInfo
from moetune.domain.spelling import nearest_then
from moetune.fit.quality import quality_of

if TYPE_CHECKING:
    from moetune.store import SqlStore

Source = Literal["file", "store", "bundled", "program"]


class ResolvedProfile(NamedTuple):
    """A profile and where it comes from."""

    profile: Profile
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileInfo:
    """A profile in a list.

    Args:
        status: status of its newest run; "" for a bundled profile.
        created_at: time of its newest run, UTC, ISO 8601; "" for a bundled profile.
    """

    name: str
    source: Source
    provenance: Provenance
    device: str
    num_devices: int
    num_runs: int
    num_samples: int
    status: str
    created_at: str


def find_profile(
    wanted: str | Profile | None, *, stores: StoreFinder, for_models: bool = False
) -> ResolvedProfile:
    """Return the profile in a file, else of that name in the store, else in the package.

    Args:
        wanted: a path that ends in .toml or has a slash, else a name, else any other existing
            file; None for the newest measured profile of the store. A program may also give the
            profile itself.
        for_models: whether None takes only machines with GPUs, as those train whole models.

    Raises:
        InputError: the file is missing or broken.
        ProfileError: no profile has this name, or none was measured yet.
    """
    if isinstance(wanted, Profile):
        return ResolvedProfile(profile=wanted, source="program")
    if wanted is None:
        with stores() as store:
            return named_profile(newest_measured(store, for_models=for_models), store=store)
    if is_path(wanted):
        return ResolvedProfile(profile=load_profile_file(Path(wanted)), source="file")
    with stores() as store:
        try:
            return named_profile(wanted, store=store)
        except ProfileError:
            if not Path(wanted).is_file():
                raise
    return ResolvedProfile(profile=load_profile_file(Path(wanted)), source="file")


def is_path(wanted: str) -> bool:
    """Return whether a text is a path of a profile's file and not a profile's name."""
    return wanted.endswith(".toml") or "/" in wanted


def named_profile(name: str, *, store: "SqlStore | None") -> ResolvedProfile:
    """Return the stored, else the bundled profile of a name; raise ProfileError for no profile."""
    stored = store.profile(name) if store else None
    if stored is not None:
        return ResolvedProfile(profile=stored, source="store")
    bundled = bundled_profiles()
    if name in bundled:
        return ResolvedProfile(profile=reference_profile(name), source="bundled")
    raise _unknown(name, {run.name for run in store.runs()} if store else set(), bundled)


def newest_measured(store: "SqlStore | None", *, for_models: bool) -> str:
    """Return the name of the newest measured profile; of a suspect profile only if all are.

    Raises:
        ProfileError: nothing was measured yet, or with `for_models` nothing on GPUs.
    """
    names = [run.name for run in store.runs() if run.provenance == "measured"] if store else []
    suspect: list[str] = []
    for name in dict.fromkeys(names):
        profile = store.profile(name) if store is not None else None
        if profile is None or (for_models and profile.machine.kind != "cuda"):
            continue
        quality = quality_of(profile)
        if quality is None or quality.label != "suspect":
            return name
        suspect.append(name)
    if suspect:
        return suspect[0]
    what, measure = "yet", "measure here:      moetune profile --nproc 2"
    if for_models and names:
        what, measure = "on GPUs, which train whole models", "measure GPUs:      moetune profile"
    first = "h100-x8" if for_models else next(iter(bundled_profiles()), "FILE.toml")
    raise ProfileError(
        f"no profile is named, and none was measured {what}",
        f"{measure}\n  or name a machine: --profile {first}",
    )


def list_profiles(store: "SqlStore | None") -> tuple[ProfileInfo, ...]:
    """Return the store's profiles, newest first, and then the bundled profiles."""
    runs: dict[str, list[RunInfo]] = {}
    for run in store.runs() if store else ():
        runs.setdefault(run.name, []).append(run)
    stored = (
        ProfileInfo(
            name=newest.name, source="store", provenance=newest.provenance, device=newest.device,
            num_devices=newest.num_devices, num_runs=1 + len(older), status=newest.status,
            num_samples=sum(run.num_samples for run in (newest, *older)),
            created_at=newest.created_at,
        )
        for newest, *older in runs.values()
    )  # fmt: skip
    references = map(reference_profile, bundled_profiles())
    bundled = (
        ProfileInfo(
            name=profile.name, source="bundled", provenance=profile.provenance,
            device=profile.machine.device, num_devices=profile.machine.num_devices,
            num_runs=0, num_samples=len(profile.samples), status="", created_at="",
        )
        for profile in references
    )  # fmt: skip
    return *stored, *bundled


def import_profile(path: Path, *, name: str | None, store: "SqlStore") -> Profile:
    """Add a file's profile to the store, as `name` if given; errors: see `load_profile_file`."""
    profile = load_profile_file(path)
    if name is not None:
        profile = replace(profile, name=name)
    store.save_profile(profile)
    return profile


def remove_profile(name: str, *, store: "SqlStore | None") -> int:
    """Delete a name's runs and fits and return the number of runs; raise ProfileError for none."""
    removed = store.remove_profile(name) if store else 0
    if removed:
        return removed
    if name in bundled_profiles():
        raise ProfileError(f"profile {name!r} comes with moetune and is not in the store")
    raise _unknown(name, {run.name for run in store.runs()} if store else set(), {})


def _unknown(name: str, stored: set[str], bundled: Mapping[str, Path]) -> MoetuneError:
    """Return the error for a profile that is unknown, or whose measurement was not finished."""
    if name in stored:
        return ProfileError(
            f"profile {name!r} is not finished: its measurement was ended before its fit",
            f"go on with it:  moetune profile --name {name} --resume",
        )
    names = sorted({*stored, *bundled})
    there = f"known: {', '.join(names)}" if names else "there are no profiles yet"
    return ProfileError(
        f"profile {name!r} is unknown",
        nearest_then(
            f"{there}\n  measure it on the cluster:  moetune profile --name {name}", name, names
        ),
    )
