"""`moetune profile --for PLAN`: refusals, nothing to measure, and a measurement on two ranks."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moetune import config
from moetune.domain.cluster import Cluster
from moetune.domain.corrections import CorrectedOp, Correction
from moetune.domain.gemm_forms import GemmForm
from moetune.domain.profile import Profile
from moetune.domain.samples import CollectivePoint, GemmPoint, Point, Sample
from moetune.fit.profile import fit_profile
from moetune.store import open_store
from moetune.workflows.profile_request import MeasurementSetting, ProfileRequest, detect_cluster
from tests.cli.running import Cli

LAYER = (
    "--d-model", "64", "--d-hidden", "128", "--num-experts", "2", "--tokens", "256",
    "--dtype", "float32",
)  # fmt: skip
FORMS: tuple[GemmForm, ...] = ("forward", "grad_input", "grad_weight")


@pytest.fixture
def cluster(home: Path) -> Cluster:
    assert home.is_dir()
    setting = MeasurementSetting(environment=config.environment())
    return detect_cluster(ProfileRequest(num_ranks=2), setting)


def profile_of(cluster: Cluster, *, octaves: int = 8, noise: float = 1e-4) -> Profile:
    """Return a profile of this machine whose times are made up.

    Args:
        octaves: sizes of exchanges in flight, from 1 KiB on.
    """
    points: dict[Point, float] = {}
    for rows in (2**at for at in range(9)):
        for d_in, d_out in ((64, 128), (128, 64)):
            for form in FORMS:
                product = GemmPoint(
                    dtype="float32", product=form, rows=rows, d_in=d_in, d_out=d_out
                )
                points[product] = 1e-6 + 1e-9 * rows * d_in * d_out
    for in_flight, count in ((1, 8), (4, octaves)):
        for size in (2 ** (10 + at) for at in range(count)):
            exchange = CollectivePoint(
                op="all_to_all", group_size=2, num_bytes=size, in_flight=in_flight
            )
            points[exchange] = 1e-5 + 5e-8 * size
    rng = np.random.default_rng(0)
    samples = [
        Sample(point=point, seconds=tuple((seconds * np.exp(noise * rng.normal(size=5))).tolist()))
        for point, seconds in points.items()
    ]
    return fit_profile(
        name="here", machine=cluster.machine, fingerprint=cluster.fingerprint, samples=samples
    )


def save(database: Path, profile: Profile) -> None:
    database.parent.mkdir(parents=True, exist_ok=True)
    with open_store(str(database)) as store:
        store.save_profile(profile)


def stored(database: Path) -> Profile:
    with open_store(str(database), read_only=True) as store:
        found = store.profile("here")
    assert found is not None
    return found


def plan_id(cli: Cli, *flags: str) -> str:
    result = cli("plan", "--profile", "here", *LAYER, *flags, "--json")
    assert result.code == 0, result.err
    return str(result.document["id"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--for", "abc"), ("begins with 'abc'", "moetune plan")),
        (("--for", "plan.json"), ("plan.json cannot be read",)),
        (("--for", "abc", "--model", "bert-l"), ("--model does not apply with --for", "omit it")),
        (("--for", "abc", "--resume"), ("--resume does not apply",)),
        (("--for", "abc", "--nproc", "2"), ("--nproc does not apply",)),
    ],
)
def test_a_plan_that_is_not_there_and_flags_that_do_not_apply_are_bad_input(
    cli: Cli, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    result = cli("profile", *arguments)
    assert (result.code, result.out) == (2, "")
    for word in words:
        assert word in result.err


def test_a_plan_of_a_published_profile_has_nothing_to_measure(cli: Cli) -> None:
    cli("plan", "--model", "gpt-s", "--profile", "rtx2080ti-x64", "--no-save", "--output", "p.json")
    result = cli("profile", "--for", "p.json")
    assert (result.code, result.out) == (2, "")
    assert "published profile 'rtx2080ti-x64'" in result.err
    assert "moetune profile" in result.err


def test_a_plan_of_a_profile_that_changed_since_has_to_be_made_again(
    cli: Cli, cluster: Cluster, database: Path
) -> None:
    save(database, profile_of(cluster))
    made = plan_id(cli)
    save(database, profile_of(cluster, noise=0.01))
    result = cli("profile", "--for", made[:8])
    assert (result.code, result.out) == (5, "")
    assert f"has changed since: plan {made[:6]}" in result.err


@pytest.mark.parametrize(
    ("hardware", "software", "words"),
    [
        ({"cpu": "another"}, {}, ("'here' is not of this machine with 2 ranks",)),
        ({}, {"torch": "1.0"}, ("torch 1.0 there", "moetune profiles check here")),
    ],
)
def test_samples_of_this_machine_are_not_added_to_another_ones(
    cli: Cli,
    cluster: Cluster,
    database: Path,
    hardware: dict[str, str],
    software: dict[str, str],
    words: tuple[str, ...],
) -> None:
    here = cluster.fingerprint
    other = replace(
        here,
        hardware={**here.hardware, **hardware},
        software={**here.software, **software},
    )
    save(database, replace(profile_of(cluster), fingerprint=other))
    made = plan_id(cli)
    result = cli("profile", "--for", made)
    assert (result.code, result.out) == (2, "")
    for word in words:
        assert word in result.err


def test_where_nothing_is_worth_measuring_it_says_so(
    cli: Cli, cluster: Cluster, database: Path
) -> None:
    save(database, profile_of(cluster))
    made = plan_id(cli)
    result = cli("profile", "--for", made)
    assert result.code == 0, result.err
    assert "Nothing is worth measuring" in result.out
    document = cli("profile", "--for", made, "--json").document
    assert document["schema"] == "moetune.profile-for/1"
    assert document["plan_id"] == made
    assert document["worth"]["groups"] == []
    assert document["worth"]["before"] == document["worth"]["after"]
    assert (document["seconds"], document["run"], document["after"]) == (None, None, None)
    assert stored(database) == profile_of(cluster)


CORRECTED: tuple[tuple[CorrectedOp, int], ...] = (
    ("all_to_all", 2), ("experts_forward", 0), ("experts_backward", 0),
)  # fmt: skip


@pytest.fixture
def uncertain(cluster: Cluster, database: Path) -> Profile:
    """A profile with two small sizes of exchanges in flight, and corrections by observations."""
    corrections = tuple(
        Correction(op=op, group_size=ranks, size=2**14, factor=1.01, num_calls=9, num_batches=3)
        for op, ranks in CORRECTED
    )
    profile = replace(profile_of(cluster, octaves=2), corrections=corrections)
    save(database, profile)
    return profile


def test_the_points_are_named_before_they_are_measured(
    cli: Cli, uncertain: Profile, database: Path
) -> None:
    made = plan_id(cli)
    words = cli("profile", "--for", made, "--plan-only")
    assert words.code == 0, words.err
    assert "all_to_all of 2 ranks" in words.out
    assert "known exactly" in words.out
    assert "points, about" in words.out
    assert stored(database) == uncertain


def test_what_is_worth_it_is_measured_on_two_ranks_and_the_plan_made_again(
    cli: Cli, uncertain: Profile, database: Path
) -> None:
    made = plan_id(cli)
    result = cli("profile", "--for", made[:8], "--budget", "6s", "--json")
    assert result.code == 0, result.err
    document = result.document
    wanted = [point for group in document["worth"]["groups"] for point in group["points"]]
    now = stored(database)
    assert now.samples[: len(uncertain.samples)] == uncertain.samples
    new = now.samples[len(uncertain.samples) :]
    assert new
    sizes = {point["num_bytes"] for point in wanted}
    assert document["seconds"] > 0
    for sample in new:
        assert isinstance(sample.point, CollectivePoint)
        assert sample.point.num_bytes in sizes
    assert [one.op for one in now.corrections] == ["experts_forward", "experts_backward"]
    assert document["run"]["num_reused"] == len(uncertain.samples)
    assert document["run"]["num_samples"] == len(now.samples)

    again = cli("plan", "--profile", "here", *LAYER, "--no-save", "--json").document
    after = document["after"]
    assert after["plan_id"] == again["id"] != made
    assert after["forward_degree"] == again["pipeline"]["forward_degree"]
    assert after["confidence"]["expected_regret"] == again["decision"]["expected_regret"]
    explained = cli("explain", after["plan_id"][:8], "--json")
    assert explained.code == 0, explained.err
