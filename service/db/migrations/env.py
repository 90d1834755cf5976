"""Alembic's entry point. The connection, and the transaction it is in, come from `service.db.migrate`."""

from alembic import context

from service.db.tables import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata, render_as_batch=True)
context.run_migrations()
