"""`moetune profiles`: listed, imported, exported and removed."""

import tomllib
from pathlib import Path

import pytest

from moetune.app.files import bundled_profiles, load_profile_file, profile_to_toml
from tests.cli.running import Cli

NAMES = ("a100-x4", "a100-x8", "a800-x8", "b200-x8", "b300-x8", "b300-x8-efa", "gb200-nvl72",
         "gb300-nvl72", "gh200-x1", "gh200-x4", "h100-96gb-x8", "h100-x8", "h100-x8-efa", "h20-x8",
         "h200-x8", "h800-x8", "l40s-x8", "mi300x-x8", "mi355x-x8", "rtx2080ti-x16",
         "rtx2080ti-x32", "rtx2080ti-x64", "rtx4090-x8", "v100-x256")  # fmt: skip


@pytest.fixture
def lab(cli: Cli) -> Path:
    """A profile file whose all_to_all is twice as slow as the reference's."""
    cli("profiles", "export", "rtx2080ti-x64", "--output", "lab.toml")
    path = Path("lab.toml")
    text = path.read_text(encoding="utf-8").replace('name = "rtx2080ti-x64"', 'name = "lab"')
    path.write_text(text.replace("0.000783", "0.001566"), encoding="utf-8")
    return path


def test_profiles_list_shows_reference_machines_without_a_store(cli: Cli, database: Path) -> None:
    document = cli("profiles", "list", "--json").document
    assert document["schema"] == "moetune.profiles/1"
    assert [row["name"] for row in document["profiles"]] == list(NAMES)
    assert {row["source"] for row in document["profiles"]} == {"bundled"}
    shown = cli("profiles", "list").out
    assert all(name in shown for name in NAMES)
    assert not database.exists()


def test_an_imported_profile_is_listed_shown_and_planned_with(cli: Cli, lab: Path) -> None:
    imported = cli("profiles", "import", str(lab), "--json").document
    assert imported["name"] == "lab"
    listed = cli("profiles", "list", "--json").document["profiles"]
    assert (listed[0]["name"], listed[0]["source"]) == ("lab", "store")
    assert cli("profiles", "show", "lab", "--json").document["name"] == "lab"
    assert "1.57 ms" in cli("profiles", "show", "lab").out
    plan = cli("plan", "--model", "gpt-s", "--profile", "lab", "--json").document
    assert plan["inputs"]["profile"] == "lab"


def test_import_under_another_name_keeps_the_rest(cli: Cli, lab: Path) -> None:
    imported = cli("profiles", "import", str(lab), "--name", "other")
    assert "moetune plan --model gpt-s --profile other\n" in imported.err
    spaced = cli("profiles", "import", str(lab), "--name", "by hand")
    assert "--profile 'by hand'" in spaced.err
    shown = cli("profiles", "show", "other", "--json").document
    expected = cli("profiles", "show", "./lab.toml", "--json").document
    assert shown == {**expected, "name": "other"}


def test_a_stored_profile_comes_before_a_reference_of_the_same_name(cli: Cli, lab: Path) -> None:
    cli("profiles", "import", str(lab), "--name", "rtx2080ti-x64")
    shown = cli("profiles", "show", "rtx2080ti-x64", "--json").document
    assert shown["collective"][0]["alpha_seconds"] == 0.001566


def test_export_prints_toml_that_is_the_profile(cli: Cli) -> None:
    for name in NAMES:
        text = cli("profiles", "export", name).out
        path = bundled_profiles()[name]
        assert text == profile_to_toml(load_profile_file(path))
        written = tomllib.loads(path.read_text(encoding="utf-8"))
        assert "base" in written or tomllib.loads(text) == written


def test_export_to_a_file_can_be_imported_again(cli: Cli, lab: Path) -> None:
    cli("profiles", "import", str(lab))
    done = cli("profiles", "export", "lab", "--output", "again.toml", "--json").document
    assert done == {"schema": "moetune.profiles.export/1", "name": "lab", "file": "again.toml"}
    assert load_profile_file(Path("again.toml")) == load_profile_file(lab)


def test_places_of_a_collective_have_separate_lines(cli: Cli, lab: Path) -> None:
    line = '[[collective]]\nop = "all_reduce"\ngroup_size = 4\n'
    inside = f"\n{line}alpha_seconds = 1e-5\nbeta_seconds_per_byte = 1e-11\n"
    across = f"\n{line}num_nodes = 4\nalpha_seconds = 1e-4\nbeta_seconds_per_byte = 1e-9\n"
    text = lab.read_text(encoding="utf-8")
    lab.write_text(text + inside + across, encoding="utf-8")
    shown = " ".join(cli("profiles", "show", "./lab.toml").out.split())
    assert "all_reduce of 4 ranks 10.0 µs 100 GB/s" in shown
    assert "all_reduce of 4 ranks on 4 nodes" in " ".join(
        shown.replace("100 µs 1 GB/s not known", "").split()
    )


def test_removed_profiles_are_gone(cli: Cli, lab: Path) -> None:
    cli("profiles", "import", str(lab))
    cli("profiles", "import", str(lab))
    removed = cli("profiles", "remove", "lab", "--json").document
    assert removed == {"schema": "moetune.profiles.remove/1", "name": "lab", "num_runs": 2}
    assert cli("profiles", "show", "lab").code == 5
