"""`moetune plans`, `moetune observations` and `moetune db prune`."""

import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from moetune.app.files import bundled_profiles, load_profile_file, profile_to_toml
from moetune.domain.plan import Decision
from moetune.domain.profile import RowsLine
from moetune.domain.records import Settled
from moetune.store import open_store
from tests.cli.running import Cli
from tests.store.values import observed_run

PLAN = ("plan", "--profile", "rtx2080ti-x64", "--dtype", "float16", "--json", "--model")
OLD = "2020-01-01T00:00:00.000000+00:00"


@pytest.fixture
def plans(cli: Cli) -> tuple[str, str]:
    """Ids of two stored plans."""
    small, large = (cli(*PLAN, model).document["id"] for model in ("gpt-s", "gpt-xl"))
    return small, large


def settle(database: Path, plan_id: str, count: int) -> None:
    """Store what searches settled under a plan."""
    size = Settled(plan_id=plan_id, hardware_id="a", memory_reuse=None, tokens_per_rank=8,
                   decision=Decision(forward_degree=1, backward_degree=1), seconds=(1.1,),
                   planned_seconds=1.0, num_steps=9)  # fmt: skip
    with open_store(str(database)) as store:
        for _ in range(count):
            store.add_settled(size)


def observe(database: Path, count: int, plan_id: str = "") -> None:
    with open_store(str(database)) as store:
        for _ in range(count):
            store.add_observed_run(observed_run(plan_id=plan_id))


def age(database: Path, table: str, condition: str = "1") -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(f"UPDATE {table} SET created_at = ? WHERE {condition}", (OLD,))  # noqa: S608


def test_plans_are_listed_by_their_facts(cli: Cli, database: Path, plans: tuple[str, str]) -> None:
    small, large = plans
    listed = cli("plans", "list", "--json").document
    assert listed["schema"] == "moetune.plans.list/1"
    assert [row["id"] for row in listed["plans"]] == [large, small]
    age(database, "plans", f"id = '{large}'")
    for arguments, expected in (
        (("--model", "gpt-xl"), [large]), (("--profile", "rtx2080ti-x64"), [small, large]),
        (("--profile", "other"), []), (("--newer-than", "7d"), [small]),
    ):  # fmt: skip
        rows = cli("plans", "list", *arguments, "--json").document["plans"]
        assert [row["id"] for row in rows] == expected
    assert small[:8] in cli("plans", "list").out


def test_a_long_list_says_how_many_follow(cli: Cli, database: Path) -> None:
    observe(database, 25)
    assert "… and 5 more: --all" in cli("observations", "list").out
    assert "more: --all" not in cli("observations", "list", "--all").out
    assert len(cli("observations", "list", "--json").document["runs"]) == 25
    assert len(cli("observations", "list", "--limit", "3", "--json").document["runs"]) == 3


def test_observations_are_listed_by_plan_and_removed(
    cli: Cli, database: Path, plans: tuple[str, str]
) -> None:
    for plan_id in plans:
        observe(database, 2, plan_id)
    runs = cli("observations", "list", "--plan", plans[0][:8], "--json").document["runs"]
    assert {run["plan_id"] for run in runs} == {plans[0]}
    numbers = [f"r{run['id']}" for run in runs]
    assert cli("observations", "remove", *numbers, "--json").document["removed"] == 2
    again = cli("observations", "remove", numbers[0])
    assert (again.code, numbers[0] in again.err) == (2, True)
    assert len(cli("observations", "list", "--json").document["runs"]) == 2


def test_removed_plans_take_settled_sizes(cli: Cli, database: Path, plans: tuple[str, str]) -> None:
    settle(database, plans[0], 3)
    removed = cli("plans", "remove", plans[0][:8], "--json").document["removed"]
    assert removed == {"plans": 1, "settled": 3}
    assert [row["id"] for row in cli("plans", "list", "--json").document["plans"]] == [plans[1]]
    assert cli("plans", "remove", plans[0]).code == 2
    assert "removed 1 plan and" in cli("plans", "remove", plans[1][:10]).out


def test_a_plan_is_shown_written_and_compared(cli: Cli, home: Path, plans: tuple[str, str]) -> None:
    small, large = plans
    shown = cli("plans", "show", small[:8])
    assert "moetune" not in shown.err
    assert "GPT" in shown.out.upper()
    printed = cli("plans", "show", small[:8], "--json")
    document = printed.document
    assert document["id"] == small
    file = home / "work" / "small.json"
    file.write_text(printed.out)
    assert cli("plans", "show", str(file), "--json").document == document
    diff = cli("plans", "diff", str(file), large[:8], "--json").document
    assert (diff["first"], diff["second"]) == (small, large)
    decisions, parts = diff["sections"][-1]["tables"]
    assert decisions["name"] == "decisions"
    other = cli("plans", "show", large[:8], "--json").document
    steps = [plan["predicted"]["step_seconds"] for plan in (document, other)]
    assert parts["rows"][-1][:3] == ["step", *steps]
    assert cli("plans", "show", "zzz").code == 2
    assert "the same plan" in cli("plans", "diff", str(file), str(file)).out


def test_pruning_counts_before_it_deletes(cli: Cli, database: Path, plans: tuple[str, str]) -> None:
    settle(database, plans[0], 4)
    age(database, "settled")
    age(database, "plans", f"id = '{plans[0]}'")
    prune = ("db", "prune", "--older-than", "90d")
    expected = {"plans": 1, "settled": 4}
    dry = cli(*prune, "--dry-run", "--json").document
    assert (dry["removed"], dry["dry_run"]) == (expected, True)
    assert len(cli("plans", "list", "--json").document["plans"]) == 2
    done = cli(*prune, "--json").document
    assert done["removed"] == expected
    assert [row["id"] for row in cli("plans", "list", "--json").document["plans"]] == [plans[1]]
    assert "removed 0 plans" in cli(*prune).out


@pytest.mark.parametrize("arguments", [
    ("plans", "remove", "abc"), ("observations", "remove", "r1"), ("observations", "remove", "1"),
    ("db", "prune", "--older-than", "1d"), ("db", "prune", "--older-than", "long"),
    ("db", "prune", "--older-than", "3"), ("plans", "list", "--newer-than", "7"),
    ("plans", "list", "--newer-than", "99999d"), ("observations", "list", "--plan", "zz"),
])  # fmt: skip
def test_a_refusal_makes_no_database(cli: Cli, database: Path, arguments: tuple[str, ...]) -> None:
    answer = cli(*arguments)
    assert answer.code == 2, answer
    assert "Traceback" not in answer.err
    assert not database.exists()


def test_long_tables_say_how_many_more(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    profile = load_profile_file(bundled_profiles()["a100-x4"])
    rows = tuple(
        RowsLine(op=f"op{at}", dtype="float32", alpha_seconds=1e-6, beta_seconds_per_element=1e-12)
        for at in range(50)
    )
    file.write_text(profile_to_toml(replace(profile, rows=rows)), encoding="utf-8")
    words = "profiles", "show", str(file)
    cut, whole = cli(*words).out, cli(*words, "--all").out
    (more,) = re.findall(r"… and (\d+) more: --all", cut)
    assert "more: --all" not in whole
    for at in range(50):
        assert f"op{at} " in whole
    missing = [at for at in range(50) if f"op{at} " not in cut]
    assert 0 < len(missing) <= int(more)
    document = cli(*words, "--json").out
    assert "more: --all" not in document
    assert all(f"op{at}" in document for at in range(50))
