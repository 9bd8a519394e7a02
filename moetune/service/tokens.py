"""Token files: read once at the start, refused where others could read them."""

import os
import stat
from pathlib import Path

from moetune.domain.errors import InputError

MIN_TOKEN_CHARACTERS = 16
_MAX_FILE_BYTES = 4096
_MAKE_ONE = "make one:  (umask 077; python -c 'import secrets; print(secrets.token_hex(32))' > {})"


def read_token_file(path: Path) -> str:
    """Return the token in a file that only its owner can read.

    Raises:
        InputError: the file is missing, no file, open to others, or holds no token. The text
            names the file and never shows what is in it.
    """
    try:
        with path.open("rb") as file:
            _check_mode(path, os.fstat(file.fileno()))
            content = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise InputError(
            f"token file {path} cannot be read: {error.strerror}", _MAKE_ONE.format(path)
        ) from None
    return _checked(path, content)


def check_secret_file(path: Path, what: str) -> None:
    """Refuse a secret's file that is missing or that everybody can read.

    Raises:
        InputError: so it is.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise InputError(f"{what} {path} cannot be read: {error.strerror}") from None
    if mode & stat.S_IROTH:
        raise InputError(f"{what} {path} can be read by everybody", f"chmod o-r {path}")


def _check_mode(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise InputError(f"token file {path} is no file", _MAKE_ONE.format(path))
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError(
            f"token file {path} is open to others (mode {stat.S_IMODE(found.st_mode):04o})",
            f"chmod 600 {path}, and make a new token if others may have read it",
        )


def _checked(path: Path, content: bytes) -> str:
    token = content.decode("ascii", errors="replace").strip()
    problem = ""
    if len(token) < MIN_TOKEN_CHARACTERS:
        problem = f"has fewer than {MIN_TOKEN_CHARACTERS} characters"
    elif len(content) >= _MAX_FILE_BYTES:
        problem = "is too long for a token"
    elif not all("!" <= character <= "~" for character in token):
        problem = "holds more than one word of plain characters"
    if problem:
        raise InputError(f"token file {path} {problem}", _MAKE_ONE.format(path))
    return token
