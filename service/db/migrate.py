"""Runs Alembic from code: each process brings the database up to date when it starts."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

MIGRATIONS = Path(__file__).with_name("migrations")


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Run the migrations up to `revision` in the caller's transaction."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)
