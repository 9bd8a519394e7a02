"""Wiring: opens stores, service clients and the detected cluster from the settings.

Functions import heavy libraries inside, so that a command loads only what it uses.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from moetune import config
from moetune.config import Configuration, Settings
from moetune.domain.cluster import Cluster
from moetune.domain.errors import BadStoreError, MoetuneError, SchemaMismatchError, needed_by

if TYPE_CHECKING:
    from moetune.runtime.plans.service import ServiceClient
    from moetune.store import SqlStore

StoreFinder: TypeAlias = "Callable[[], AbstractContextManager[SqlStore | None]]"
"""Function that opens the store to read it; it gives None if there is no store yet."""
_warn_once = cache(logging.getLogger("moetune").warning)


def configure(
    *, db: str | None = None, file: Path | None = None, no_files: bool = False
) -> Configuration:
    """Return this process's settings in this folder; raise InputError for a wrong setting."""
    return config.load(
        environ=config.environment(), directory=Path.cwd(), db=db, file=file, no_files=no_files
    )


def open_store(
    settings: Settings, *, read_only: bool = False, patience_seconds: float | None = None
) -> AbstractContextManager["SqlStore"]:
    """Open the settings' store; without `read_only`, create it if there is none.

    Args:
        patience_seconds: longest wait for a lock; None for the command line's default.

    Raises:
        InputError, MoetuneError: it is not a database, or cannot be reached, read or written.
    """
    from moetune import store

    check_store(settings)
    return store.open_store(
        settings.db, read_only=read_only, upgrades=True, patience_seconds=patience_seconds
    )


def check_store(settings: Settings) -> None:
    """Raise BadStoreError if the settings name no database because there is no home folder."""
    if settings.db == config.NO_STORE:
        raise BadStoreError(
            "this user has no home folder, in which the store would be",
            "set HOME, or name a database with --db",
        )


@contextmanager
def find_store(
    settings: Settings, *, upgrades: bool = True, is_needed: bool = True
) -> Iterator["SqlStore | None"]:
    """Open the store to read it, or give None if there is no store yet; errors: see `open_store`.

    Args:
        upgrades: upgrade a user's file of an older schema, as `open_store` does.
        is_needed: False gives None, with a warning, for a store with another schema. The command
            then fails only if it lacks a profile or a plan.
    """
    if settings.db == config.NO_STORE or not _may_exist(settings.db):
        yield None
        return
    from moetune import store

    if store.current(settings.db).revision is None:
        yield None
        return
    try:
        opened = store.open_store(settings.db, read_only=True, upgrades=upgrades)
    except SchemaMismatchError as error:
        if is_needed:
            raise
        _warn_once(f"warning: the store is not read: {error.what}: {error.hint}")
        try:
            yield None
        except MoetuneError:
            raise error from None
        return
    with opened:
        yield opened


def _may_exist(db: str) -> bool:
    """Return whether a database may exist; False only for a plain path without a file."""
    is_plain = ":" not in db and "\0" not in db and bool(db.strip()) and not db.startswith("~")
    return not is_plain or os.access(db, os.F_OK)  # False in a folder that may not be entered


def service_client(url: str) -> "ServiceClient":
    """Return a client for a checked URL with this user's token and cache; or raise InputError."""
    from moetune.runtime.plans.service import ServiceClient, ServiceConnection

    environ = config.environment()
    connection = ServiceConnection(url, config.service_token(environ))
    return ServiceClient(connection, config.cache_folder(environ) / "plans")


def searches_folder(settings: Settings) -> Path:
    """Return the folder of the searches' trials, next to the SQLite file or in the data folder."""
    from moetune import store

    check_store(settings)
    file = store.database_file(settings.db)
    if file is None:
        file = Path(config.default_database(config.environment()))
    return file.parent / "searches"


def detect_cluster() -> Cluster:
    """Return this machine as a single rank sees it; raise MissingPackageError without torch."""
    with needed_by("reading this machine"):
        from moetune import hardware

    return hardware.detect(num_ranks=1, ranks_per_node=None, environment=config.environment())
