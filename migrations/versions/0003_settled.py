"""What searches in training decided."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "settled",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("plan_id", sa.String(64), nullable=False),
        sa.Column("hardware_id", sa.String(16), nullable=False),
        sa.Column("memory_reuse", sa.Text, nullable=True),
        sa.Column("tokens_per_rank", sa.BigInteger, nullable=False),
        sa.Column("forward_degree", sa.BigInteger, nullable=False),
        sa.Column("backward_degree", sa.BigInteger, nullable=False),
        sa.Column("issue_order", sa.Text, nullable=False),
        sa.Column("strategy", sa.Text, nullable=False),
        sa.Column("median_seconds", sa.Double, nullable=False),
        sa.Column("planned_seconds", sa.Double, nullable=False),
        sa.Column("seconds", sa.JSON, nullable=False),
        sa.Column("num_steps", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_settled")),
        sa.ForeignKeyConstraint(["plan_id"], ["plans.id"], name=op.f("fk_settled_plan_id_plans")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_settled_plan_id"), "settled", ["plan_id"])
