"""The hierarchical exchange is withdrawn: what was measured of it goes, and both its columns."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("observations", "settled"):
        table = sa.table(name, sa.column("dispatcher"))
        op.execute(sa.delete(table).where(table.c.dispatcher == "hierarchical"))
        with op.batch_alter_table(name, table_kwargs={"sqlite_autoincrement": True}) as batch:
            batch.drop_column("dispatcher")
    samples = sa.table("samples", sa.column("id"), sa.column("point", sa.JSON))
    found = op.get_bind().execute(sa.select(samples)).all()
    withdrawn = [{"number": one} for one, point in found if point.get("op") == "all_to_all_2d"]
    if withdrawn:
        mine = samples.c.id == sa.bindparam("number")
        op.get_bind().execute(sa.delete(samples).where(mine), withdrawn)
