"""Two batches in turns are withdrawn: their times, their searches' results and their column go."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_POINT = "turns"


def upgrade() -> None:
    for name in ("observations", "settled"):
        table = sa.table(name, sa.column("overlap"))
        op.execute(sa.delete(table).where(table.c.overlap.is_not(None)))
        with op.batch_alter_table(name, table_kwargs={"sqlite_autoincrement": True}) as batch:
            batch.drop_column("overlap")
    samples = sa.table("samples", sa.column("kind"))
    op.execute(sa.delete(samples).where(samples.c.kind == _POINT))
