"""Run revisions on the connection that moetune.store opened: it owns the transaction."""

from alembic import context

from moetune.store.migrate import CONTEXT_OPTIONS
from moetune.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    **CONTEXT_OPTIONS,
)
with context.begin_transaction():
    context.run_migrations()
