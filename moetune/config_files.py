"""Settings files: `moetune.toml`, or `[tool.moetune]` of a `pyproject.toml`, read for `config`."""

import logging
import os
import stat
import tomllib
from pathlib import Path

from moetune.domain.errors import InputError

FILE_NAME = "moetune.toml"
_ROOT = 0
_LOGGER = logging.getLogger("moetune")


def nearest(directory: Path) -> tuple[str, dict[str, object]] | None:
    """Return the name and the settings of the first file in a directory or above; None for none.

    Raises:
        InputError: the file cannot be read.
    """
    for folder in (directory, *directory.parents):
        if _is_private(folder / FILE_NAME):
            return str(folder / FILE_NAME), read(folder / FILE_NAME)
        project = folder / "pyproject.toml"
        if _is_private(project) and (settings := _read_project(project)) is not None:
            return f"{project} [tool.moetune]", settings
    return None


def is_there(file: Path) -> bool:
    """Return whether it is a file; False in a folder that this user may not enter."""
    return os.access(file, os.F_OK) and file.is_file()


def _is_private(file: Path) -> bool:
    """Return whether it is a file that no other user owns or may write; others are ignored."""
    if not is_there(file):
        return False
    status = file.stat()
    is_others = status.st_uid not in {os.getuid(), _ROOT}
    may_write = status.st_mode & stat.S_IWOTH or (
        status.st_mode & stat.S_IWGRP and status.st_gid not in {os.getgid(), _ROOT}
    )
    if is_others or may_write:
        why = "belongs to another user" if is_others else "can be written by other users"
        _LOGGER.warning(
            "settings file %s is ignored: it %s; name it with --config to read it", file, why
        )
        return False
    return True


def read(file: Path) -> dict[str, object]:
    """Return the settings in a file.

    Raises:
        InputError: the file cannot be read.
    """
    return _resolve_paths(_parse(file, _read_text(file)), file.parent)


def _read_project(file: Path) -> dict[str, object] | None:
    text = _read_text(file)
    if "moetune" not in text:  # a broken pyproject.toml of somebody else must not stop a command
        return None
    tool = _parse(file, text).get("tool")
    table = tool.get("moetune") if isinstance(tool, dict) else None
    return _resolve_paths(table, file.parent) if isinstance(table, dict) else None


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        problem = "is not UTF-8 text"
    raise InputError(
        f"settings file {file} {problem}",
        "name another with --config, or read none with --no-config",
    )


def _parse(file: Path, text: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"settings file {file} is not valid TOML: {error}") from None


def _resolve_paths(values: dict[str, object], folder: Path) -> dict[str, object]:
    """Resolve relative paths against the settings file's folder, not the working directory."""
    placed = dict(values)
    for key in ("db", "profile"):
        text = values.get(key)
        is_file = isinstance(text, str) and (key == "db" or text.endswith(".toml") or "/" in text)
        if isinstance(text, str) and text and is_file and "://" not in text:
            placed[key] = str(folder / Path(text).expanduser())
    return placed
