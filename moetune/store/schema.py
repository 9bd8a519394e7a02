"""The tables. A change here needs a new revision in `migrations/versions`.

Times of day are UTC as ISO 8601 text and documents are canonical JSON, so that SQLite and
PostgreSQL keep the same bytes. The newest row is the one with the largest id: clocks may go back.
"""

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

# `fingerprint` is the hash of the facts and the sizes: published machines have no facts, and
# one host may be measured with several numbers of devices.
machines = Table(
    "machines",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("fingerprint", String(64), nullable=False, unique=True),
    Column("hardware_id", String(16), nullable=False, index=True),
    Column("facts", JSON, nullable=False),
    Column("kind", Text, nullable=False),
    Column("device", Text, nullable=False),
    Column("num_devices", BigInteger, nullable=False),
    Column("devices_per_node", BigInteger, nullable=False),
    Column("memory_bytes", BigInteger, nullable=False),
    Column("created_at", Text, nullable=False),
    sqlite_autoincrement=True,
)

# Without autoincrement SQLite gives a removed run's id to the next one, and a process that
# still writes to the removed run would write to the new one.
runs = Table(
    "runs",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("machine_id", ForeignKey("machines.id"), nullable=False, index=True),
    Column("name", Text, nullable=False, index=True),
    Column("provenance", Text, nullable=False),
    Column("preset", Text, nullable=False),
    Column("software", JSON, nullable=False),
    Column("status", Text, nullable=False),
    Column("created_at", Text, nullable=False),
    CheckConstraint("status IN ('running', 'complete', 'partial')", name="status"),
    sqlite_autoincrement=True,
)

samples = Table(
    "samples",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", ForeignKey("runs.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("kind", Text, nullable=False),
    Column("point", JSON, nullable=False),
    Column("seconds", JSON, nullable=False),
    Column("num_iterations", BigInteger, nullable=False),
    Column("marks", JSON, nullable=False),
    Column("error", Text, nullable=False),
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
    Column("document", JSON, nullable=False),
    Column("last_sample_id", Integer, nullable=False),
    Column("created_at", Text, nullable=False),
    sqlite_autoincrement=True,
)

plans = Table(
    "plans",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("model", Text, nullable=True),
    Column("profile", Text, nullable=False),
    Column("world_size", BigInteger, nullable=False),
    Column("tokens_per_rank", BigInteger, nullable=False),
    Column("document", JSON, nullable=False),
    Column("created_at", Text, nullable=False),
    Index(None, "created_at", "id"),
)

observations = Table(
    "observations",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("plan_id", ForeignKey("plans.id"), nullable=False, index=True),
    Column("forward_degree", BigInteger, nullable=False),
    Column("backward_degree", BigInteger, nullable=False),
    Column("tokens_per_rank", BigInteger, nullable=False),
    Column("predicted_seconds", Double, nullable=False),
    Column("seconds", JSON, nullable=False),
    Column("source", Text, nullable=False),
    Column("created_at", Text, nullable=False),
    Column("operations", JSON, nullable=False, server_default="[]"),
    Column("device_id", Text, nullable=False, server_default=""),
    Column("strategy", Text, nullable=True),
    sqlite_autoincrement=True,
)

settled_sizes = Table(
    "settled",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("plan_id", ForeignKey("plans.id"), nullable=False, index=True),
    Column("hardware_id", String(16), nullable=False),
    Column("memory_reuse", Text, nullable=True),
    Column("tokens_per_rank", BigInteger, nullable=False),
    Column("forward_degree", BigInteger, nullable=False),
    Column("backward_degree", BigInteger, nullable=False),
    Column("issue_order", Text, nullable=False),
    Column("strategy", Text, nullable=False),
    Column("median_seconds", Double, nullable=False),
    Column("planned_seconds", Double, nullable=False),
    Column("seconds", JSON, nullable=False),
    Column("num_steps", BigInteger, nullable=False),
    Column("created_at", Text, nullable=False),
    sqlite_autoincrement=True,
)
