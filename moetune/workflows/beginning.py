"""Samples of earlier runs that a run of the same profile begins with."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moetune.domain.cluster import Cluster
from moetune.domain.profile import Profile
from moetune.domain.samples import Point, Sample

if TYPE_CHECKING:
    from moetune.store import SqlStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The start of a run.

    Args:
        run_id: of an unfinished run to continue; None for a new one.
        known: samples that it begins with, or has.
        done: points that need not be measured.
        base: the profile that it continues, where it has tables of another one; else None.
    """

    run_id: int | None = None
    known: tuple[Sample, ...] = ()
    done: frozenset[Point] = frozenset()
    base: Profile | None = None


def resumed(store: "SqlStore", name: str, cluster: Cluster) -> Beginning:
    """Return the last unfinished run of this name on this machine, else the current profile.

    What they have measured without an error is done.
    """
    run_id = store.open_run(name=name, fingerprint=cluster.fingerprint)
    current = store.profile(name) if run_id is None else None
    known: tuple[Sample, ...] = ()
    if run_id is not None:
        known = store.samples(run_id)
    elif current is not None and current.fingerprint == cluster.fingerprint:
        known = current.samples
    done = frozenset(sample.point for sample in known if not sample.error)
    return Beginning(run_id=run_id, known=known, done=done, base=_base_of(current))


def _base_of(current: Profile | None) -> Profile | None:
    """Return what a measured profile took from another one: all but its own samples."""
    if current is None or not (current.tables or current.network):
        return None
    return replace(current, samples=())
