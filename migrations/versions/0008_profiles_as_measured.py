"""Profiles without the corrections by observations, which are withdrawn: they are as measured."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    fits = sa.table("fits", sa.column("id", sa.Integer), sa.column("document", sa.JSON))
    connection = op.get_bind()
    for fit, document in connection.execute(sa.select(fits.c.id, fits.c.document)).all():
        if document.pop("corrections", None):
            connection.execute(sa.update(fits).where(fits.c.id == fit).values(document=document))
