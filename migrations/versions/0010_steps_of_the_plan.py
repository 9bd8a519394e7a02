"""Observed steps have the strategy of their plan: those of another, by searches, go."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    table = sa.table("observations", sa.column("strategy"))
    op.execute(sa.delete(table).where(table.c.strategy.is_not(None)))
    with op.batch_alter_table("observations", table_kwargs={"sqlite_autoincrement": True}) as batch:
        batch.drop_column("strategy")


def downgrade() -> None:
    with op.batch_alter_table("observations") as batch:
        batch.add_column(sa.Column("strategy", sa.Text, nullable=True))
