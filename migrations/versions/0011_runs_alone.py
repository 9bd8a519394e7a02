"""No steps that `verify` measured: observed runs of whole models alone."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.drop_table("observations")


def downgrade() -> None:
    op.create_table(
        "observations",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("plan_id", sa.String(64), nullable=False),
        sa.Column("forward_degree", sa.BigInteger, nullable=False),
        sa.Column("backward_degree", sa.BigInteger, nullable=False),
        sa.Column("tokens_per_rank", sa.BigInteger, nullable=False),
        sa.Column("predicted_seconds", sa.Double, nullable=False),
        sa.Column("seconds", sa.JSON, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("created_at", sa.Text, nullable=False),
        sa.Column("device_id", sa.Text, nullable=False, server_default=""),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_observations")),
        sa.ForeignKeyConstraint(
            ["plan_id"], ["plans.id"], name=op.f("fk_observations_plan_id_plans")
        ),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_observations_plan_id"), "observations", ["plan_id"])
