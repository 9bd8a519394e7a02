"""Files that stay whole if the process is killed: written to a temporary name, then renamed."""

import os
import secrets
from contextlib import suppress
from pathlib import Path


def replace_file(target: Path, data: bytes) -> None:
    """Write a file; its earlier content stays until the new content is on the disk.

    Raises:
        OSError: the file cannot be written; an earlier file is unchanged.
    """
    if target.is_dir():
        raise IsADirectoryError(0, "it is a folder")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to the disk, so that a new file survives a power cut, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
