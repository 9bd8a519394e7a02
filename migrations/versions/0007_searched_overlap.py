"""The overlap of two batches, which a search in training decides as well."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    for table in ("observations", "settled"):
        with op.batch_alter_table(table) as batch:
            batch.add_column(sa.Column("overlap", sa.Text, nullable=True))
