"""The database of profiles, plans and observations. SQLAlchemy and Alembic live only here."""

from moetune.store.address import database_file
from moetune.store.admin import backup, check, current, upgrade
from moetune.store.migrate import SchemaState
from moetune.store.sql_store import SqlStore, open_store

__all__ = [
    "SchemaState",
    "SqlStore",
    "backup",
    "check",
    "current",
    "database_file",
    "open_store",
    "upgrade",
]
