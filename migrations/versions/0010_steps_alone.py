"""Observed steps without times of operations; steps of other strategies than the plan's go."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    table = sa.table("observations", sa.column("strategy"))
    op.execute(sa.delete(table).where(table.c.strategy.is_not(None)))
    with op.batch_alter_table("observations", table_kwargs={"sqlite_autoincrement": True}) as batch:
        batch.drop_column("strategy")
        batch.drop_column("operations")


def downgrade() -> None:
    with op.batch_alter_table("observations") as batch:
        batch.add_column(sa.Column("operations", sa.JSON, nullable=False, server_default="[]"))
        batch.add_column(sa.Column("strategy", sa.Text, nullable=True))
