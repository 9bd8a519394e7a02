"""What searches in training decide: dispatchers, and steps observed with other decisions."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    with op.batch_alter_table("observations") as batch:
        batch.add_column(sa.Column("strategy", sa.Text, nullable=True))
        batch.add_column(sa.Column("dispatcher", sa.Text, nullable=True))
    # A search had always the plan's dispatcher before.
    with op.batch_alter_table("settled") as batch:
        batch.add_column(sa.Column("dispatcher", sa.Text, nullable=False, server_default="flat"))
    plans = sa.table("plans", sa.column("id", sa.String), sa.column("document", sa.JSON))
    settled = sa.table("settled", sa.column("plan_id", sa.String), sa.column("dispatcher", sa.Text))
    searched = sa.select(plans).where(plans.c.id.in_(sa.select(settled.c.plan_id)))
    for plan_id, document in op.get_bind().execute(searched).all():
        dispatcher = document.get("pipeline", {}).get("dispatcher", "flat")
        mine = settled.c.plan_id == plan_id
        op.execute(sa.update(settled).where(mine).values(dispatcher=dispatcher))
