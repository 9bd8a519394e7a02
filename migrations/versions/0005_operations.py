"""Observed operations of a step, and the machine that they were observed on."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    with op.batch_alter_table("observations") as batch:
        batch.add_column(sa.Column("operations", sa.JSON, nullable=False, server_default="[]"))
        batch.add_column(sa.Column("device_id", sa.Text, nullable=False, server_default=""))
