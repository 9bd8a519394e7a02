"""Checksums of backups: a line of `sha256sum` in a file next to each.

SQLite finds broken pages, but not other bytes in a text, a number or a page that is in no use. The
checksum finds every change; `sha256sum --check` reads the same file.
"""

import hashlib
import os
import re
from pathlib import Path

from moetune.domain.errors import BadStoreError

_LINE = re.compile(rb"\\?([0-9a-f]{64}) [ *][^\n]+\n?")
_OTHERS = "take another backup, or use an older one"


def checksum_file(backup: Path) -> Path:
    """Return the place of a backup's checksum."""
    return backup.with_name(f"{backup.name}.sha256")


def write_checksum(backup: Path) -> Path:
    """Write the checksum of a finished backup next to it, both synced to the disk.

    Raises:
        OSError: the backup cannot be read, or the folder not be written.
    """
    with backup.open("rb") as file:
        os.fsync(file.fileno())
        found = hashlib.file_digest(file, "sha256").hexdigest()
    name, mark = _escaped(backup.name)
    target = checksum_file(backup)
    target.touch(mode=0o600, exist_ok=False)
    with target.open("wb") as file:
        file.write(os.fsencode(f"{mark}{found}  {name}\n"))
        file.flush()
        os.fsync(file.fileno())
    return target


def check_checksum(backup: Path) -> None:
    """Compare a file with its checksum, if there is one next to it.

    Raises:
        BadStoreError: the file is not the one that was made, or the checksum cannot be read.
    """
    # An absolute path, and nothing opened where there is none: closing a database's file would
    # drop the locks of this process's connections to it.
    place = checksum_file(backup)
    if not place.exists() or not backup.is_file():
        return
    try:
        line = _LINE.fullmatch(place.read_bytes())
        with backup.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BadStoreError(
            f"{backup} cannot be compared with its checksum {place}: {error.strerror}",
            "check that you may read both files, and the health of the disk",
        ) from error
    if line is None:
        raise BadStoreError(
            f"{place} holds no checksum of {backup.name}: it is damaged",
            f"{_OTHERS}; without that file nobody can say whether {backup.name} is whole",
        )
    wanted = line[1].decode()
    if found != wanted:
        raise BadStoreError(
            f"{backup} is damaged: its sha256 is {found[:12]}…, by {place} it was {wanted[:12]}… "
            "when it was made",
            f"{_OTHERS}; if it was put to use since and so changed, remove {place.name}",
        )


def _escaped(name: str) -> tuple[str, str]:
    """Return a file's name as `sha256sum` writes it, and the mark that it did so."""
    escaped = name.replace("\\", r"\\").replace("\n", r"\n").replace("\r", r"\r")
    return escaped, "" if escaped == name else "\\"
