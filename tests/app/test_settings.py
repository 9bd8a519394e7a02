"""Settings: a flag beats a variable, the project's file, the user's, and the default."""

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from moetune.config import (
    Configuration,
    Settings,
    cache_folder,
    is_disabled,
    launch,
    load,
    service_token,
    without_password,
)
from moetune.domain.errors import InputError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder two levels below the home."""
    folder = tmp_path / "project" / "src"
    folder.mkdir(parents=True)
    return folder


def _load(home: Path, directory: Path, **environ: str) -> Configuration:
    return load(environ={"HOME": str(home), **environ}, directory=directory)


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_flag_beats_variable_project_user_and_default(tmp_path: Path, work: Path) -> None:
    def origin_and_db(*, db: str | None = None, **environ: str) -> tuple[str, str]:
        loaded = load(environ={"HOME": str(tmp_path), **environ}, directory=work, db=db)
        return loaded.origins["db"], loaded.settings.db

    default = str(tmp_path / ".local" / "share" / "moetune" / "moetune.db")
    assert origin_and_db() == ("default", default)
    user = _write(tmp_path / ".config" / "moetune" / "moetune.toml", 'db = "/user.db"')
    assert origin_and_db() == (str(user), "/user.db")
    project = _write(work.parent / "moetune.toml", 'db = "/project.db"')
    assert origin_and_db() == (str(project), "/project.db")
    assert origin_and_db(MOETUNE_DB="v.db") == ("MOETUNE_DB", "v.db")
    assert origin_and_db(MOETUNE_DB="v.db", db="flag.db") == ("--db", "flag.db")


def test_user_and_project_files_are_merged(tmp_path: Path, work: Path) -> None:
    _write(tmp_path / ".config/moetune/moetune.toml", "max_degree = 2\nmin_chunk_tokens = 3")
    _write(work / "moetune.toml", "max_degree = 4")
    settings = _load(tmp_path, work).settings
    assert (settings.max_degree, settings.min_chunk_tokens) == (4, 3)


def test_data_and_config_folders_of_xdg_are_used(tmp_path: Path, work: Path) -> None:
    _write(tmp_path / "c" / "moetune" / "moetune.toml", "max_degree = 7")
    loaded = _load(
        tmp_path, work, XDG_CONFIG_HOME=str(tmp_path / "c"), XDG_DATA_HOME=str(tmp_path / "d")
    )
    assert loaded.settings.max_degree == 7
    assert loaded.settings.db == str(tmp_path / "d" / "moetune" / "moetune.db")


def test_a_project_table_counts_and_the_file_next_to_it_wins(tmp_path: Path, work: Path) -> None:
    project = _write(work / "pyproject.toml", "[tool.moetune]\nmax_degree = 5")
    loaded = _load(tmp_path, work)
    assert loaded.settings.max_degree == 5
    assert loaded.origins["max_degree"].startswith(str(project))
    _write(work / "moetune.toml", "max_degree = 6")
    assert _load(tmp_path, work).settings.max_degree == 6


def test_a_project_file_without_our_table_is_walked_past(tmp_path: Path, work: Path) -> None:
    _write(work / "pyproject.toml", '[project]\ndependencies = ["moetune"]')
    _write(work.parent / "moetune.toml", "max_degree = 6")
    assert _load(tmp_path, work).settings.max_degree == 6
    _write(work / "pyproject.toml", "broken = = but none of our business")
    assert _load(tmp_path, work).settings.max_degree == 6
    _write(work / "pyproject.toml", "[tool.moetune]\nmax_degree = = 5")
    with pytest.raises(InputError, match=r"pyproject\.toml .*line 2"):
        _load(tmp_path, work)


def test_a_named_file_replaces_others_and_no_files_reads_none(tmp_path: Path, work: Path) -> None:
    _write(tmp_path / ".config/moetune/moetune.toml", "min_chunk_tokens = 3")
    _write(work / "moetune.toml", "max_degree = 4")
    named = _write(tmp_path / "named.toml", "max_degree = 9")
    environ = {"HOME": str(tmp_path), "MOETUNE_PRESET": "quick"}
    settings = load(environ=environ, directory=work, file=named).settings
    assert (settings.max_degree, settings.min_chunk_tokens, settings.preset) == (9, 1, "quick")
    settings = load(environ=environ, directory=work, no_files=True).settings
    assert (settings.max_degree, settings.min_chunk_tokens, settings.preset) == (64, 1, "quick")


def test_files_in_a_settings_file_lie_next_to_it(tmp_path: Path, work: Path) -> None:
    _write(work.parent / "moetune.toml", 'db = "lab.db"\nprofile = "lab.toml"')
    settings = _load(tmp_path, work).settings
    assert settings.db == str(work.parent / "lab.db")
    assert settings.profile == str(work.parent / "lab.toml")
    _write(work.parent / "moetune.toml", 'db = "postgresql://h/d"\nprofile = "lab"')
    settings = _load(tmp_path, work).settings
    assert (settings.db, settings.profile) == ("postgresql://h/d", "lab")


@pytest.mark.parametrize(("name", "text", "attribute", "expected"), [
    ("MOETUNE_ALLOW_MODELLED", "1", "allow_modelled", True),
    ("MOETUNE_ALLOW_MODELLED", "TRUE", "allow_modelled", True),
    ("MOETUNE_ALLOW_MODELLED", "false", "allow_modelled", False),
    ("MOETUNE_MAX_DEGREE", "8", "max_degree", 8),
    ("MOETUNE_MIN_CHUNK_TOKENS", "1k", "min_chunk_tokens", 1024),
    ("MOETUNE_DTYPE", "float16", "dtype", "float16"),
    ("MOETUNE_BUDGET", "2m", "budget", "2m"),
    ("MOETUNE_URL", "http://planner:8642", "url", "http://planner:8642"),
    ("MOETUNE_URL", "https://[::1]/moetune/", "url", "https://[::1]/moetune/"),
    ("MOETUNE_PROFILE", "", "profile", None),
])  # fmt: skip
def test_variables_have_the_type_of_their_setting(
    tmp_path: Path, name: str, text: str, attribute: str, expected: object
) -> None:
    loaded = _load(tmp_path, tmp_path, **{name: text})
    assert getattr(loaded.settings, attribute) == expected


@pytest.mark.parametrize(("name", "text"), [
    ("MOETUNE_ALLOW_MODELLED", "yes"), ("MOETUNE_MAX_DEGREE", "many"),
    ("MOETUNE_MAX_DEGREE", "0"), ("MOETUNE_PRESET", "slow"), ("MOETUNE_DTYPE", "int8"),
    ("MOETUNE_BUDGET", "soon"), ("MOETUNE_URL", "planner:8642"),
    ("MOETUNE_URL", "ftp://planner"), ("MOETUNE_URL", "http://"),
    ("MOETUNE_URL", "http://planner:port"), ("MOETUNE_URL", "http://planner:0"),
    ("MOETUNE_URL", "http://plan ner"), ("MOETUNE_URL", "http://planner\n"),
    ("MOETUNE_URL", "http://[::1"), ("MOETUNE_URL", "http://planner/?token=7f3a"),
])  # fmt: skip
def test_a_wrong_variable_is_named(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(InputError, match=name):
        _load(tmp_path, tmp_path, **{name: text})


def test_the_example_names_every_setting_with_its_default() -> None:
    text = (ROOT / "moetune.toml").read_text(encoding="utf-8")
    assert tomllib.loads(text) == {}
    values = tomllib.loads(re.sub(r"(?m)^# (\w+ = )", r"\1", text))
    assert list(values) == [item.name for item in fields(Settings)]
    for item in fields(Settings):
        if item.name not in ("db", "profile", "dtype", "budget", "url"):
            assert values[item.name] == item.default
    assert Settings(**values).budget == "2m"


def test_the_examples_database_is_the_default(tmp_path: Path) -> None:
    text = (ROOT / "moetune.toml").read_text(encoding="utf-8")
    shown = Path(tomllib.loads(re.sub(r"(?m)^# (db = )", r"\1", text))["db"])
    db = Path(_load(tmp_path, tmp_path).settings.db)
    assert db == tmp_path / shown.relative_to("~")


def test_a_launch_is_read_whole_and_a_process_started_by_hand_is_none() -> None:
    assert launch({"PATH": "/bin", "MASTER_ADDR": "x"}) is None
    launched = launch(
        {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8",
         "MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
    )  # fmt: skip
    assert launched is not None
    assert (launched.rank, launched.world_size) == (9, 16)
    assert (launched.local_rank, launched.local_world_size) == (1, 8)
    assert (launched.master_addr, launched.master_port) == ("node0", 1234)


@pytest.mark.parametrize("environ", [
    {"RANK": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"},
    {"RANK": "-1", "WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": "two"},
    {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": ""},
])  # fmt: skip
def test_a_broken_launch_is_bad_input(environ: dict[str, str]) -> None:
    with pytest.raises(InputError, match=r"RANK|WORLD_SIZE|MASTER_PORT"):
        launch(environ)


def test_disabled_is_asked_for_by_variable() -> None:
    assert is_disabled({"MOETUNE_DISABLE": "1"})
    assert not is_disabled({"MOETUNE_DISABLE": "0"})
    assert not is_disabled({})
    with pytest.raises(InputError, match="MOETUNE_DISABLE"):
        is_disabled({"MOETUNE_DISABLE": "please"})


@pytest.mark.parametrize("db", [
    "postgresql+psycopg://me:secret@host:5432/db",
    "postgresql://host/db?user=me&password=secret&sslmode=require",
    "postgresql://me:sec/ret@host/db",
])  # fmt: skip
def test_passwords_are_hidden_and_nothing_else(db: str) -> None:
    shown = without_password(db)
    assert "sec" not in shown.replace("***", "")
    assert shown.replace("***", "") == db.replace("sec/ret", "").replace("secret", "")
    assert without_password("/home/me/moetune.db") == "/home/me/moetune.db"


def test_a_password_in_an_address_is_refused_and_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="MOETUNE_TOKEN") as caught:
        _load(tmp_path, tmp_path, MOETUNE_URL="http://me:secret@planner")
    assert "secret" not in str(caught.value)


def test_the_services_token_is_one_word_of_the_environment() -> None:
    assert service_token({}) is None
    assert service_token({"MOETUNE_TOKEN": ""}) is None
    assert service_token({"MOETUNE_TOKEN": "7f3a-9_x\n"}) == "7f3a-9_x"
    for text in ("two words", "ü7f3a", "7f3a\nx", "7f3a\x00"):
        with pytest.raises(InputError, match="MOETUNE_TOKEN") as caught:
            service_token({"MOETUNE_TOKEN": text})
        assert text not in str(caught.value)


def test_the_cache_is_the_users(tmp_path: Path) -> None:
    assert cache_folder({"HOME": "/home/me"}) == Path("/home/me/.cache/moetune")
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "moetune"


def test_with_a_token_only_the_user_names_the_service(tmp_path: Path, work: Path) -> None:
    file = _write(work / "moetune.toml", 'url = "https://stranger.example.org"')
    plain = {"HOME": str(tmp_path)}
    secret = {**plain, "MOETUNE_TOKEN": "token-of-a-team"}
    assert _load(tmp_path, work).service_url(plain) == "https://stranger.example.org"
    with pytest.raises(InputError, match="would get MOETUNE_TOKEN") as caught:
        _load(tmp_path, work).service_url(secret)
    assert str(file) in caught.value.what
    assert "token-of-a-team" not in str(caught.value)
    named = _load(tmp_path, work, MOETUNE_URL="https://own.example.org")
    assert named.service_url(secret) == "https://own.example.org"
    file.unlink()
    assert _load(tmp_path, work).service_url(secret) is None
    _write(tmp_path / ".config/moetune/moetune.toml", 'url = "https://team.example.org"')
    assert _load(tmp_path, work).service_url(secret) == "https://team.example.org"


@pytest.mark.parametrize("mode", [0o666, 0o646])
def test_a_file_that_others_may_write_is_ignored_and_named(
    mode: int, tmp_path: Path, work: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = _write(work / "moetune.toml", "max_degree = 2")
    file.chmod(mode)
    assert _load(tmp_path, work).origins["max_degree"] == "default"
    assert str(file) in caplog.text
    file.chmod(0o644)
    assert _load(tmp_path, work).origins["max_degree"] == str(file)


def test_a_file_of_another_user_is_ignored_and_named(
    tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = _write(work / "moetune.toml", "max_degree = 2")
    file.chmod(0o644)
    owner = file.stat().st_uid
    monkeypatch.setattr("moetune.config_files._ROOT", -1)
    monkeypatch.setattr("os.getuid", lambda: owner + 1)
    assert _load(tmp_path, work).origins["max_degree"] == "default"
    assert "belongs to another user" in caplog.text


def test_only_the_nearest_file_counts(tmp_path: Path, work: Path) -> None:
    _write(work.parent / "moetune.toml", "max_degree = 2\nmin_chunk_tokens = 9")
    _write(work / "moetune.toml", "max_degree = 4")
    settings = _load(tmp_path, work).settings
    assert (settings.max_degree, settings.min_chunk_tokens) == (4, 1)
