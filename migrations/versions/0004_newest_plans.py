"""The order in which plans are listed."""

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    # Without it a page of plans reads every plan's document on the way to its time.
    op.create_index(op.f("ix_plans_created_at_id"), "plans", ["created_at", "id"])
