"""What was measured: machines, runs, samples and fits."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "machines",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("hardware_id", sa.String(16), nullable=False),
        sa.Column("facts", sa.JSON, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("device", sa.Text, nullable=False),
        sa.Column("num_devices", sa.BigInteger, nullable=False),
        sa.Column("devices_per_node", sa.BigInteger, nullable=False),
        sa.Column("memory_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_machines")),
        sa.UniqueConstraint("fingerprint", name=op.f("uq_machines_fingerprint")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_machines_hardware_id"), "machines", ["hardware_id"])
    op.create_table(
        "runs",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("machine_id", sa.Integer, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("provenance", sa.Text, nullable=False),
        sa.Column("preset", sa.Text, nullable=False),
        sa.Column("software", sa.JSON, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("created_at", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        sa.ForeignKeyConstraint(
            ["machine_id"], ["machines.id"], name=op.f("fk_runs_machine_id_machines")
        ),
        sa.CheckConstraint(
            "status IN ('running', 'complete', 'partial')", name=op.f("ck_runs_status")
        ),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_runs_machine_id"), "runs", ["machine_id"])
    op.create_index(op.f("ix_runs_name"), "runs", ["name"])
    _create_samples_and_fits()


def _create_samples_and_fits() -> None:
    op.create_table(
        "samples",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("run_id", sa.Integer, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("point", sa.JSON, nullable=False),
        sa.Column("seconds", sa.JSON, nullable=False),
        sa.Column("num_iterations", sa.BigInteger, nullable=False),
        sa.Column("marks", sa.JSON, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_samples")),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name=op.f("fk_samples_run_id_runs"), ondelete="CASCADE"
        ),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_samples_run_id"), "samples", ["run_id"])
    op.create_table(
        "fits",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("run_id", sa.Integer, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("document", sa.JSON, nullable=False),
        sa.Column("last_sample_id", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_fits")),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name=op.f("fk_fits_run_id_runs"), ondelete="CASCADE"
        ),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_fits_run_id"), "fits", ["run_id"])
    op.create_index(op.f("ix_fits_name"), "fits", ["name"])
