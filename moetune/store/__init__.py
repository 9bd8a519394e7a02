"""The database of profiles, plans and observed runs. SQLAlchemy and Alembic live only here."""

from moetune.store.address import database_file
from moetune.store.admin import SqlStore, check, current, open_store, upgrade
from moetune.store.migrate import SchemaState

__all__ = ["SchemaState", "SqlStore", "check", "current", "database_file", "open_store", "upgrade"]
