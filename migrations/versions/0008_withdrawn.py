"""Columns and rows of what is withdrawn go: exchanges, turns, 8-bit experts and corrections."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


_OPS = ("all_to_all_2d", "quantize", "quantize_matrix", "quantize_wire")
_DTYPES = ("fp8_rowwise_emulated", "mxfp8_emulated")


def upgrade() -> None:
    for name in ("observations", "settled"):
        table = sa.table(name, sa.column("dispatcher"), sa.column("overlap"))
        op.execute(sa.delete(table).where(table.c.dispatcher == "hierarchical"))
        op.execute(sa.delete(table).where(table.c.overlap.is_not(None)))
        with op.batch_alter_table(name, table_kwargs={"sqlite_autoincrement": True}) as batch:
            batch.drop_column("dispatcher")
            batch.drop_column("overlap")
    samples = sa.table("samples", sa.column("id"), sa.column("point", sa.JSON))
    found = op.get_bind().execute(sa.select(samples)).all()
    withdrawn = [{"number": one} for one, point in found if _is_withdrawn(point)]
    if withdrawn:
        mine = samples.c.id == sa.bindparam("number")
        op.get_bind().execute(sa.delete(samples).where(mine), withdrawn)
    fits = sa.table("fits", sa.column("id", sa.Integer), sa.column("document", sa.JSON))
    for fit, document in op.get_bind().execute(sa.select(fits)).all():
        if document.pop("corrections", None):
            mine = sa.update(fits).where(fits.c.id == fit)
            op.get_bind().execute(mine.values(document=document))


def _is_withdrawn(point: dict[str, Any]) -> bool:
    is_named = point.get("op") in _OPS or point.get("dtype") in _DTYPES
    return is_named or point.get("kind") == "turns" or "quantization" in point.get("workload", {})
