"""The tables. A change here needs a new revision in `migrations/versions`.

Times of day are UTC as ISO 8601 text and documents are canonical JSON, so that SQLite and
PostgreSQL keep the same bytes. The newest row has the largest id: clocks may go back.
"""

from collections.abc import Iterator
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)

VERSION_TABLE = "moetune_revision"

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _columns(kind: Any, *names: str) -> Iterator[Column[Any]]:  # noqa: ANN401 - a type of SQLAlchemy
    """Return columns of a type that are never null."""
    return (Column(name, kind, nullable=False) for name in names)


# `fingerprint` is the hash of the facts and the sizes: published machines have no facts, and
# one host may be measured with several numbers of devices.
machines = Table(
    "machines",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("fingerprint", String(64), nullable=False, unique=True),
    Column("hardware_id", String(16), nullable=False, index=True),
    *_columns(JSON, "facts"),
    *_columns(Text, "kind", "device", "created_at"),
    *_columns(BigInteger, "num_devices", "devices_per_node", "memory_bytes"),
    sqlite_autoincrement=True,
)

# Without autoincrement SQLite gives a removed run's id to the next run, and a process that
# still writes to the removed run would write to the new run.
runs = Table(
    "runs",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("machine_id", ForeignKey("machines.id"), nullable=False, index=True),
    Column("name", Text, nullable=False, index=True),
    *_columns(Text, "provenance", "preset", "status", "created_at"),
    *_columns(JSON, "software"),
    CheckConstraint("status IN ('running', 'complete', 'partial')", name="status"),
    sqlite_autoincrement=True,
)

samples = Table(
    "samples",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", ForeignKey("runs.id", ondelete="CASCADE"), nullable=False, index=True),
    *_columns(Text, "kind", "error"),
    *_columns(JSON, "point", "seconds", "marks"),
    *_columns(BigInteger, "num_iterations"),
    sqlite_autoincrement=True,
)

# The document is the profile without its samples; these are the run's up to
# `last_sample_id`, so that a run which is resumed later does not change an older fit.
fits = Table(
    "fits",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", ForeignKey("runs.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("name", Text, nullable=False, index=True),
    *_columns(JSON, "document"),
    *_columns(Integer, "last_sample_id"),
    *_columns(Text, "created_at"),
    sqlite_autoincrement=True,
)

plans = Table(
    "plans",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("model", Text, nullable=True),
    *_columns(Text, "profile", "created_at"),
    *_columns(BigInteger, "world_size", "tokens_per_rank"),
    *_columns(JSON, "document"),
    Index(None, "created_at", "id"),
)

# Without a reference to `plans`: a run outlives its plan, and a launch file's run has no plan.
observed_runs = Table(
    "observed_runs",
    metadata,
    Column("id", Integer, primary_key=True),
    *_columns(Text, "plan_id", "model", "profile", "profile_fingerprint", "device", "target"),
    *_columns(Text, "target_version", "dtype", "layout", "source", "created_at"),
    *_columns(BigInteger, "world_size", "global_batch", "seq", "num_steps"),
    *_columns(Double, "seconds", "low_seconds", "high_seconds", "predicted_seconds"),
    Column("memory_bytes", BigInteger, nullable=True),
    Column("predicted_bytes", BigInteger, nullable=True),
    *_columns(JSON, "parts"),
    Index(None, "profile_fingerprint", "target"),
    sqlite_autoincrement=True,
)

settled_sizes = Table(
    "settled",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("plan_id", ForeignKey("plans.id"), nullable=False, index=True),
    Column("hardware_id", String(16), nullable=False),
    Column("memory_reuse", Text, nullable=True),
    *_columns(BigInteger, "tokens_per_rank", "forward_degree", "backward_degree", "num_steps"),
    *_columns(Text, "issue_order", "strategy", "created_at"),
    *_columns(Double, "median_seconds", "planned_seconds"),
    *_columns(JSON, "seconds"),
    sqlite_autoincrement=True,
)
