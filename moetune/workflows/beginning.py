"""Samples of earlier runs that a run of the same profile begins with."""

from dataclasses import dataclass, replace

from moetune.domain.cluster import Cluster
from moetune.domain.corrections import Correction
from moetune.domain.errors import ProfileError
from moetune.domain.gemm_forms import even_form
from moetune.domain.ports import Store
from moetune.domain.profile import Profile
from moetune.domain.samples import CollectivePoint, GemmPoint, Point, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The start of a run.

    Args:
        run_id: of an unfinished run to continue; None for a new one.
        known: samples that it begins with, or has.
        done: points that need not be measured.
        corrections: of the profile that it adds to.
        base: that profile, where it has tables of another one; else None.
    """

    run_id: int | None = None
    known: tuple[Sample, ...] = ()
    done: frozenset[Point] = frozenset()
    corrections: tuple[Correction, ...] = ()
    base: Profile | None = None


def resumed(store: Store, name: str, cluster: Cluster) -> Beginning:
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


def added_to(store: Store, name: str, cluster: Cluster) -> Beginning:
    """Return the current profile, or an unfinished run that adds to it: its own points are done.

    Raises:
        ProfileError: the store has no such profile.
    """
    current = store.profile(name)
    if current is None:
        raise ProfileError(
            f"profile {name!r} is not in the store {store.location}",
            "import its file with `moetune profiles import`, or measure it there",
        )
    run_id = store.open_run(name=name, fingerprint=cluster.fingerprint)
    known = current.samples if run_id is None else store.samples(run_id)
    count = len(current.samples)
    if known[:count] != current.samples:
        run_id, known = None, current.samples
    done = frozenset(sample.point for sample in known[count:] if not sample.error)
    return Beginning(
        run_id=run_id,
        known=known,
        done=done,
        corrections=current.corrections,
        base=_base_of(current),
    )


def _base_of(current: Profile | None) -> Profile | None:
    """Return what a measured profile took from another one: all but its own samples."""
    if current is None or not (current.tables or current.network):
        return None
    return replace(current, samples=())


def still_correct(
    corrections: tuple[Correction, ...], measured: frozenset[Point]
) -> tuple[Correction, ...]:
    """Return the corrections of operations of which nothing was measured again."""
    again: set[tuple[str, int]] = set()
    for point in measured:
        if isinstance(point, CollectivePoint):
            again.add((point.op, point.group_size))
        elif isinstance(point, GemmPoint):
            is_forward = even_form(point.product) == "forward"
            again.add(("experts_forward" if is_forward else "experts_backward", 0))
    return tuple(one for one in corrections if (one.op, one.group_size) not in again)
