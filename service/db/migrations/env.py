"""Alembic's entry point. `octet.service.db.migrate` passes it the connection, which is in a transaction."""

from alembic import context

from octet.service.db.tables import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata, render_as_batch=True)
context.run_migrations()
