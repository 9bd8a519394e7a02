"""Older, newer, foreign and half-made schemas, on SQLite and on PostgreSQL."""

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, select, text, update

from moetune.domain.errors import InputError, MoetuneError, SchemaMismatchError
from moetune.domain.samples import CollectivePoint, CopyPoint, Sample
from moetune.store import check, current, migrate, open_store, upgrade
from moetune.store.address import parse_address
from moetune.store.database import Database
from moetune.store.schema import fits
from tests.store.values import CLUSTER, MEASURED, execute, make_plan, make_profile, observed_run

OLD_SCHEMA = Path(__file__).with_name("schema_0001.sql")
HEAD = migrate.known_revisions()[-1]


def run(url: str, work: Callable[[Connection], object]) -> None:
    with Database(parse_address(url)) as database:
        database.write(work)


def tables(url: str) -> set[str]:
    names: set[str] = set()
    run(url, lambda connection: names.update(inspect(connection).get_table_names()))
    return names


@pytest.fixture
def old_file(tmp_path: Path) -> str:
    path = tmp_path / "old.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(OLD_SCHEMA.read_text())
    return str(path)


@pytest.fixture
def next_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Make a moetune with one revision more, whose upgrade runs the given statements."""

    def add(body: str) -> str:
        folder = tmp_path / "migrations"
        shutil.copytree(migrate.migrations_folder(), folder)
        number = f"{int(HEAD) + 1:04}"
        (folder / "versions" / f"{number}_next.py").write_text(
            "import sqlalchemy as sa\nfrom alembic import op\n\n"
            f"revision = {number!r}\ndown_revision = {HEAD!r}\n\n"
            f"def upgrade() -> None:\n    {body}\n"
        )
        monkeypatch.setattr(migrate, "migrations_folder", lambda: folder)
        return number

    return add


def test_the_revisions_are_one_line_and_named_like_their_files() -> None:
    scripts = ScriptDirectory(str(migrate.migrations_folder()))
    line = [script.revision for script in scripts.walk_revisions()]
    assert tuple(reversed(line)) == migrate.known_revisions()
    assert scripts.get_heads() == [HEAD]


def test_a_database_made_by_the_revisions_has_the_tables_of_the_schema(url: str) -> None:
    assert upgrade(url) == (None, HEAD)
    assert check(url) == ()


def test_the_comparison_with_the_schema_sees_a_changed_table(url: str) -> None:
    open_store(url).close()
    execute(url, "ALTER TABLE fits ADD COLUMN stray INTEGER")
    execute(url, "DROP INDEX ix_samples_run_id")
    problems = check(url)
    assert len(problems) == 2
    assert any("stray" in problem for problem in problems)
    assert any("ix_samples_run_id" in problem for problem in problems)


def dump(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


def test_an_older_file_is_refused_or_upgraded_with_its_rows_and_copied(
    old_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, rows = Path(old_file).read_bytes(), dump(Path(old_file))
    for mode, upgrades in ((0o600, False), (0o620, True), (0o602, True)):
        Path(old_file).chmod(mode)
        with pytest.raises(SchemaMismatchError) as caught:
            open_store(old_file, upgrades=upgrades)
        assert caught.value.exit_code == 7
        assert f"0001, this moetune wants {HEAD}" in caught.value.what
        assert old_file in caught.value.what
        assert "moetune db upgrade" in caught.value.hint
    assert not current(old_file).up_to_date
    assert "moetune db upgrade" in check(old_file)[0]
    assert Path(old_file).read_bytes() == before

    Path(old_file).chmod(0o600)
    with open_store(old_file, read_only=True, upgrades=True) as store:
        assert [run.name for run in store.runs()] == ["open", "old"]
    assert upgrade(old_file) == (HEAD, HEAD)
    assert check(old_file) == ()
    (copy,) = Path(old_file).parent.glob("old-*")
    assert (copy.name, copy.stat().st_mode & 0o777) == (f"old-before-{HEAD}.db", 0o600)
    assert f"as it was before: {copy}" in caplog.text
    assert dump(copy) == rows
    with open_store(old_file) as store:
        kept = store.profile("old")
        assert kept is not None
        assert kept.samples == (
            Sample(
                point=CopyPoint(direction="h2d", pinned=False, num_bytes=1024),
                seconds=(0.1 + 0.2, 1e-6),
                num_iterations=3,
            ),
            Sample(
                point=CollectivePoint(op="all_to_all", group_size=2, num_bytes=4096),
                seconds=(2e-3,),
                marks=("drift",),
            ),
        )
        assert store.open_run(name="open", fingerprint=kept.fingerprint) == 2
        store.save_plan(make_plan())
        assert len(store.plans()) == 1


def config_for(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrate.migrations_folder()))
    config.attributes["connection"] = connection
    return config


def upgrade_to(connection: Connection, revision: str) -> None:
    command.upgrade(config_for(connection), revision)


def insert(connection: Connection, into: str, **row: object) -> None:
    connection.execute(sa.table(into, *map(sa.column, row)).insert().values(row))


def test_an_older_postgresql_is_upgraded_too(url: str) -> None:
    run(url, lambda connection: upgrade_to(connection, "0001"))
    with pytest.raises(SchemaMismatchError, match="0001"):
        open_store(url)
    assert upgrade(url) == ("0001", HEAD)
    assert check(url) == ()


PLAN: dict[str, object] = {
    "id": "ab", "model": None, "profile": "lab", "world_size": 2, "tokens_per_rank": 40,
    "document": "{}", "created_at": "2026",
}  # fmt: skip
SETTLED: dict[str, object] = {
    "plan_id": "ab", "hardware_id": "f", "forward_degree": 4, "backward_degree": 3,
    "issue_order": "dispatch_first", "strategy": "none", "median_seconds": 0.5,
    "planned_seconds": 0.5, "seconds": "[0.5]", "num_steps": 9, "created_at": "2026",
}  # fmt: skip
OBSERVED: dict[str, object] = {
    "plan_id": "ab", "forward_degree": 1, "backward_degree": 1, "predicted_seconds": 0.5,
    "seconds": "[0.5]", "source": "search", "created_at": "2026",
}  # fmt: skip


@pytest.mark.parametrize(
    ("column", "stay", "go"),
    [("dispatcher", (None, "flat"), "hierarchical"), ("overlap", (None,), "both")],
)
def test_what_was_measured_of_withdrawn_things_goes_and_the_rest_stays(
    url: str, column: str, stay: tuple[str | None, ...], go: str
) -> None:
    def as_0007(connection: Connection) -> None:
        upgrade_to(connection, "0007")
        insert(connection, "plans", **PLAN)
        for tokens, value in enumerate((*stay, go), start=40):
            kept = "flat" if column == "dispatcher" else None
            columns = {"tokens_per_rank": tokens, column: value or kept}
            insert(connection, "settled", **SETTLED, **columns)

    run(url, as_0007)
    with_samples(url, ("all_to_all", "all_to_all_2d"))
    assert upgrade(url) == ("0007", HEAD)
    left = [*range(40, 40 + len(stay))]
    with open_store(url) as store:
        assert [row.tokens_per_rank for row in store.settled("ab")] == left
        (sample,) = store.samples(1)
        assert isinstance(sample.point, CollectivePoint)
        assert sample.point.op == "all_to_all"


def with_samples(url: str, ops: tuple[str, ...]) -> None:
    """Store a run with a sample of each operation, as an older version did."""

    def work(connection: Connection) -> None:
        insert(
            connection, "machines", fingerprint="f", hardware_id="f", facts="{}", kind="cpu",
            device="test", num_devices=2, devices_per_node=1, memory_bytes=1, created_at="2026",
        )  # fmt: skip
        insert(connection, "runs", machine_id=1, name="lab", provenance="measured", preset="quick",
               software="{}", status="complete", created_at="2026")  # fmt: skip
        for op in ops:
            point = {"kind": "collective", "op": op, "group_size": 2, "num_bytes": 8,
                     "in_flight": 1, "num_nodes": 0}  # fmt: skip
            insert(connection, "samples", run_id=1, kind="collective", point=json.dumps(point),
                   seconds="[0.5]", num_iterations=1, marks="[]", error="")  # fmt: skip

    run(url, work)


def test_observed_steps_of_older_schemas_go_and_runs_stay(url: str) -> None:
    with open_store(url) as store:
        store.add_observed_run(observed_run())

    def as_0010(connection: Connection) -> None:
        command.downgrade(config_for(connection), "0010")
        insert(connection, "plans", **PLAN)
        insert(connection, "observations", **OBSERVED, tokens_per_rank=40)

    run(url, as_0010)
    assert "observations" in tables(url)
    assert upgrade(url) == ("0010", HEAD)
    assert "observations" not in tables(url)
    with open_store(url) as store:
        assert [row.value for row in store.observed_runs()] == [observed_run()]
        assert store.remove_plans(["ab"]).plans == 1


def test_corrected_profiles_are_as_measured_after_the_upgrade(url: str) -> None:
    profile = make_profile()
    with open_store(url) as store:
        store.save_profile(profile)

    def as_0007(connection: Connection) -> None:
        document = connection.execute(select(fits.c.document)).scalar_one()
        corrected = document | {"corrections": [{"op": "all_to_all", "factor": 1.5}]}
        connection.execute(update(fits).values(document=corrected))
        command.downgrade(config_for(connection), "0008")
        for table in ("observations", "settled"):
            for column in ("dispatcher", "overlap"):
                connection.execute(text(f"ALTER TABLE {table} ADD COLUMN {column} TEXT"))
        connection.execute(text("UPDATE moetune_revision SET version_num = '0007'"))

    run(url, as_0007)
    assert upgrade(url) == ("0007", HEAD)
    with open_store(url) as store:
        assert store.profile(profile.name) == profile


def test_observed_runs_come_and_go_with_their_revision(url: str) -> None:
    with open_store(url) as store:
        store.save_profile(make_profile())
        assert store.add_observed_run(observed_run()) == 1
    run(url, lambda connection: command.downgrade(config_for(connection), "0008"))
    assert ("observed_runs" in tables(url), current(url).revision) == (False, "0008")
    assert upgrade(url) == ("0008", HEAD)
    assert check(url) == ()
    with open_store(url) as store:
        assert (store.observed_runs(), store.profile("h200-x8")) == ((), make_profile())


def test_a_newer_database_asks_for_the_newer_moetune(url: str) -> None:
    open_store(url).close()
    execute(url, "UPDATE moetune_revision SET version_num = '9999'")
    for attempt in (lambda: open_store(url), lambda: upgrade(url)):
        with pytest.raises(SchemaMismatchError) as caught:
            attempt()
        assert "9999" in caught.value.what
        assert "newer moetune" in caught.value.hint
    assert current(url).revision == "9999"


def test_a_revision_that_replaces_a_table_keeps_the_rows_that_refer_to_it(
    url: str, next_revision: Callable[[str], str]
) -> None:
    with open_store(url) as store:
        store.save_profile(make_profile(samples=MEASURED))
    number = next_revision(
        "with op.batch_alter_table('runs', recreate='auto') as batch:\n"
        "        batch.alter_column('preset', type_=sa.String(99))\n"
        "        batch.add_column(sa.Column('note', sa.Text, nullable=True))"
    )
    with pytest.raises(SchemaMismatchError, match=f"wants {number}"):
        open_store(url)
    assert upgrade(url) == (HEAD, number)
    with open_store(url) as store:
        assert store.profile("h200-x8") == make_profile(samples=MEASURED)


def test_a_revision_that_fails_half_way_leaves_the_database_as_it_was(
    url: str, next_revision: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(url) as store:
        store.save_profile(make_profile())
    next_revision(
        "op.create_table('half', sa.Column('id', sa.Integer))\n"
        "    op.execute('DELETE FROM fits')\n"
        "    op.execute('SELECT nonsense FROM nowhere')"
    )
    with pytest.raises(MoetuneError, match="nowhere"):
        upgrade(url)
    assert current(url).revision == HEAD
    assert "half" not in tables(url)
    monkeypatch.undo()
    with open_store(url) as store:
        assert store.profile("h200-x8") == make_profile()


def test_a_revision_of_orphans_fails(tmp_path: Path, next_revision: Callable[[str], str]) -> None:
    url = f"{tmp_path}/moetune.db"
    with open_store(url) as store:
        store.save_profile(make_profile())
    next_revision("op.execute('DELETE FROM machines')")
    with pytest.raises(MoetuneError, match="undone: row 1 of runs"):
        upgrade(url)
    assert current(url).revision == HEAD


def test_a_database_of_another_program_with_a_table_of_our_name_is_refused_untouched(
    url: str,
) -> None:
    execute(url, "CREATE TABLE runs (id INTEGER)")
    before = tables(url)
    uses: list[Callable[[str], object]] = [open_store, upgrade, current, check]
    for use in uses:
        with pytest.raises(InputError, match="'runs'"):
            use(url)
    assert tables(url) == before


def test_other_tables_in_the_same_database_are_left_alone(url: str) -> None:
    execute(url, "CREATE TABLE theirs (id INTEGER)")
    execute(url, "INSERT INTO theirs VALUES (7)")
    with open_store(url) as store:
        store.start_run(name="h200", cluster=CLUSTER, preset="quick")
    assert check(url) == ()
    assert "theirs" in tables(url)
    execute(url, "SELECT 1 / (SELECT count(*) FROM theirs WHERE id = 7)")


def test_migrations_are_of_the_package_first_and_then_of_the_checkout(tmp_path: Path) -> None:
    package = tmp_path / "moetune"
    package.mkdir()
    with pytest.raises(MoetuneError, match="migrations are missing"):
        migrate.migrations_folder(package)
    checkout, packaged = tmp_path / "migrations", package / "_migrations"
    for folder in (checkout, packaged):
        folder.mkdir()
        (folder / "env.py").touch()
    assert migrate.migrations_folder(package) == packaged
    (packaged / "env.py").unlink()
    assert migrate.migrations_folder(package) == checkout


@pytest.mark.parametrize("moetune_first", [True, False])
def test_optuna_keeps_its_studies_in_the_same_file(
    tmp_path: Path,
    moetune_first: bool,  # noqa: FBT001 - a case
) -> None:
    import optuna

    url = f"sqlite:///{tmp_path}/shared.db"
    if moetune_first:
        open_store(url).close()
    study = optuna.create_study(storage=url, study_name="theirs")
    study.tell(study.ask(), 1.0)
    with open_store(url) as store:
        store.save_profile(make_profile())
        study.tell(study.ask(), 2.0)
        assert store.profile("h200-x8") == make_profile()
    again = optuna.load_study(storage=optuna.storages.RDBStorage(url), study_name="theirs")
    assert [trial.value for trial in again.trials] == [1.0, 2.0]
    assert upgrade(url) == (HEAD, HEAD)
    assert check(url) == ()
    assert "alembic_version" in tables(url)
