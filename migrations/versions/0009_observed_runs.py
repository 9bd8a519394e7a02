"""Runs of whole models as they were measured, next to their predictions."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

_TABLE = "observed_runs"
_TEXTS = (
    "plan_id", "model", "profile", "profile_fingerprint", "device", "target", "target_version",
    "dtype", "layout", "source", "created_at",
)  # fmt: skip
_COUNTS = ("world_size", "global_batch", "seq", "num_steps")
_TIMES = ("seconds", "low_seconds", "high_seconds", "predicted_seconds")


def upgrade() -> None:
    op.create_table(
        _TABLE,
        sa.Column("id", sa.Integer, primary_key=True),
        *(sa.Column(name, sa.Text, nullable=False) for name in _TEXTS),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in _COUNTS),
        *(sa.Column(name, sa.Double, nullable=False) for name in _TIMES),
        sa.Column("memory_bytes", sa.BigInteger, nullable=True),
        sa.Column("predicted_bytes", sa.BigInteger, nullable=True),
        sa.Column("parts", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_observed_runs")),
        sqlite_autoincrement=True,
    )
    name = op.f("ix_observed_runs_profile_fingerprint_target")
    op.create_index(name, _TABLE, ["profile_fingerprint", "target"])


def downgrade() -> None:
    op.drop_table(_TABLE)
