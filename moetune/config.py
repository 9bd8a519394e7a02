"""Settings and the environment: the only reader of `os.environ` in the package.

First step of every command and of `open_planbook`. A setting is taken from a flag, else
`MOETUNE_<SETTING>`, else the nearest `moetune.toml` or `[tool.moetune]` of a `pyproject.toml` (from
the working directory upwards). After these come the user's `moetune.toml` and its default.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Literal
from urllib.parse import urlsplit

from moetune import config_files
from moetune.domain.document import decode
from moetune.domain.errors import InputError
from moetune.domain.units import dtype_bytes, full_dtype, parse_count, parse_seconds

PREFIX = "MOETUNE_"

_TRUE = ("1", "true")
_FALSE = ("0", "false")
_URL_HINT = "such as http://planner.example.org:8642"
NO_STORE = "(none)"
"""Words in place of a database, where there is none to read or to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Values that a user sets once instead of passing them to every command.

    Args:
        db: database, a file or a URL.
        profile: profile to plan with: a name or a `.toml` file; None for the newest measured.
        dtype: element type of activations; None for the profile's choice.
        allow_modelled: accept an estimate where a measurement is missing.
        max_degree: largest number of chunks of a plan.
        min_chunk_tokens: fewest tokens of one chunk.
        preset: which points `profile` measures.
        budget: longest time `profile` may take, such as "2m"; None for no limit.
        url: address of the plan service that training jobs use; None for no service.

    Raises:
        InputError: a value is out of range; the message names the setting.
    """

    db: str
    profile: str | None = None
    dtype: str | None = None
    allow_modelled: bool = False
    max_degree: int = 64
    min_chunk_tokens: int = 1
    preset: Literal["quick", "full"] = "full"
    budget: str | None = None
    url: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_degree", "min_chunk_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("db", "profile", "budget"):
            if getattr(self, name) == "":
                raise InputError(f"{name} must not be empty")
        if self.dtype is not None:
            dtype_bytes(full_dtype(self.dtype))
        if self.budget is not None:
            parse_seconds(self.budget)
        if self.url is not None:
            check_service_url(self.url)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The settings, and the source of each setting: "default", a file, a variable or a flag."""

    settings: Settings
    origins: Mapping[str, str]

    def service_url(self, environ: Mapping[str, str]) -> str | None:
        """Return the plan service's address; None where there is none.

        With a token, a file that is merely near the working directory does not name the service: a
        cloned repository's would receive the token.

        Raises:
            InputError: MOETUNE_TOKEN is set, and only such a file has a url.
        """
        origin = self.origins.get("url", "default")
        if origin in {"default", PREFIX + "URL"} or service_token(environ) is None:
            return self.settings.url
        if origin == str(user_file(environ)):
            return self.settings.url
        raise InputError(
            f"{origin} names the plan service {self.settings.url}, which would get MOETUNE_TOKEN",
            f"if you trust it, set {PREFIX}URL={self.settings.url}, or write it to "
            f"{user_file(environ) or 'your settings file'}; else unset {PREFIX}TOKEN",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A rank's place in a job, from the variables that `torchrun` or another launcher sets.

    Args:
        rank, world_size: in the job.
        local_rank, local_world_size: on this node.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int


def environment() -> Mapping[str, str]:
    """Return this process's environment."""
    return MappingProxyType(dict(os.environ))


def load(
    *,
    environ: Mapping[str, str],
    directory: Path,
    db: str | None = None,
    file: Path | None = None,
    no_files: bool = False,
) -> Configuration:
    """Return the settings that apply in a directory.

    Args:
        directory: first folder that is searched for a settings file; its parents follow.
        db: value of `--db`.
        file: read this file instead of the nearest and the user's.
        no_files: read no file at all.

    Raises:
        InputError: a file or a variable has an unknown key or a wrong value; the message names it.
    """
    default_db = default_database(environ)
    layers: list[tuple[str, dict[str, object]]] = [("default", {"db": default_db})]
    if file is not None:
        layers.append((str(file), config_files.read(file)))
    elif not no_files:
        layers += list(_files(environ, directory))
    layers += [(PREFIX + name.upper(), {name: value}) for name, value in _variables(environ)]
    if db is not None:
        layers.append(("--db", {"db": db}))
    plain: dict[str, object] = {}
    origins = dict.fromkeys((item.name for item in fields(Settings)), "default")
    for origin, values in layers:
        # Each layer is decoded separately, so that an error names the file or variable at fault.
        _check(origin, {"db": default_db, **values})
        plain |= values
        origins |= dict.fromkeys(values, origin)
    return Configuration(
        settings=decode(Settings, plain, "settings"), origins=MappingProxyType(origins)
    )


def default_database(environ: Mapping[str, str]) -> str:
    """Return the database that is used without a setting: a file in the user's data folder.

    Returns:
        NO_STORE for a user without a home folder.
    """
    try:
        return str(_folder(environ, "XDG_DATA_HOME", ".local/share") / "moetune.db")
    except InputError:
        return NO_STORE


def user_file(environ: Mapping[str, str]) -> Path | None:
    """Return the user's settings file, which need not exist; None without a home folder."""
    try:
        return _folder(environ, "XDG_CONFIG_HOME", ".config") / config_files.FILE_NAME
    except InputError:
        return None


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the user's cache folder, whose files may be deleted at any time."""
    return _folder(environ, "XDG_CACHE_HOME", ".cache")


def service_token(environ: Mapping[str, str]) -> str | None:
    """Return the plan service's token from MOETUNE_TOKEN; None where it is not set.

    Raises:
        InputError: it has a space or characters beyond ASCII; the message does not repeat it.
    """
    name = PREFIX + "TOKEN"
    token = environ.get(name, "").strip()
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise InputError(
            f"{name} has characters that no token has", f"set {name} to the token file's one line"
        )
    return token or None


def check_service_url(text: str) -> str:
    """Return the address of a plan service without a slash at its end.

    Raises:
        InputError: it is not an http or https address, or it has more than a host, a port and a
            path. A password in it is not repeated.
    """
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
        has_port = parts.port != 0
    except ValueError:
        is_address = has_port = False
    else:
        if parts.username is not None or parts.password is not None:
            raise InputError(
                "the url of the plan service holds a name or a password",
                "omit them: the token belongs in MOETUNE_TOKEN",
            )
        if parts.query or parts.fragment:
            raise InputError(
                "the url of the plan service has more than a host, a port and a path", _URL_HINT
            )
    if not (is_address and has_port and text.isprintable() and text.isascii() and " " not in text):
        raise InputError(f"url {text!r} is not the address of a plan service", _URL_HINT)
    return text.rstrip("/")


def without_password(db: str) -> str:
    """Return a database's address with `***` in place of its password."""
    return re.sub(r"(?<=//)([^/@:]*):[^@]*(?=@)|(?<=password=)[^&]*", _hide_password, db)


def launch(environ: Mapping[str, str]) -> Launch | None:
    """Return the launch that this process is a rank of; None when it was started by hand.

    Raises:
        InputError: the launcher's variables are incomplete or not numbers.
    """
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    world_size = _number(environ, "WORLD_SIZE")
    rank = _number(environ, "RANK")
    if not 0 <= rank < world_size:
        raise InputError(f"RANK is {rank}, but WORLD_SIZE is {world_size}")
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK", rank),
        local_world_size=_number(environ, "LOCAL_WORLD_SIZE", world_size),
        master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(environ, "MASTER_PORT", 29500),
    )


def is_disabled(environ: Mapping[str, str]) -> bool:
    """Return whether MOETUNE_DISABLE is set: layers then take no plan and run one chunk."""
    name = PREFIX + "DISABLE"
    return _boolean(name, environ[name]) if environ.get(name) else False


def _hide_password(match: re.Match[str]) -> str:
    return f"{match[1]}:***" if match[1] is not None else "***"


def _folder(environ: Mapping[str, str], variable: str, usual: str) -> Path:
    """Return moetune's folder under a variable's folder, else in the user's home."""
    if environ.get(variable):
        return Path(environ[variable]) / "moetune"
    try:
        home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    except RuntimeError:
        raise InputError("this user has no home folder", "set HOME") from None
    return home / usual / "moetune"


def _files(environ: Mapping[str, str], directory: Path) -> Iterator[tuple[str, dict[str, object]]]:
    file = user_file(environ)
    if file is not None and config_files.is_there(file):
        yield str(file), config_files.read(file)
    nearest = config_files.nearest(directory)
    if nearest is not None:
        yield nearest


def _check(origin: str, values: Mapping[str, object]) -> None:
    try:
        decode(Settings, values, "settings")
    except InputError as error:
        raise InputError(f"{origin}: {error.what}", error.hint) from None


def _variables(environ: Mapping[str, str]) -> list[tuple[str, object]]:
    default = Settings(db="-")
    settings: list[tuple[str, object]] = []
    for item in fields(Settings):
        name = PREFIX + item.name.upper()
        text = environ.get(name)
        if text:
            settings.append((item.name, _as_kind(name, text, getattr(default, item.name))))
    return settings


def _as_kind(name: str, text: str, default: object) -> object:
    if isinstance(default, bool):
        return _boolean(name, text)
    if isinstance(default, int):
        try:
            return parse_count(text)
        except InputError as error:
            raise InputError(f"{name}: {error.what}") from None
    return full_dtype(text) if name == "dtype" else text


def _boolean(name: str, text: str) -> bool:
    if text.lower() in (*_TRUE, *_FALSE):
        return text.lower() in _TRUE
    raise InputError(f"{name} must be one of 1, 0, true, false, got {text!r}")


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise InputError(
            f"the launcher set {name} to {text!r}, which is not a number",
            "start the ranks with torchrun, or unset RANK and WORLD_SIZE",
        )
    return int(text)
