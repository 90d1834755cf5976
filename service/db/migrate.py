"""Runs Alembic from code: each process brings the database up to date when it starts."""

from pathlib import Path

from sqlalchemy import Connection, inspect, text

MIGRATIONS = Path(__file__).with_name("migrations")


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Run the migrations up to `revision` in the caller's transaction."""
    if revision == "head" and _is_new(connection):
        return
    # A server that has nothing to migrate does without Alembic's 11 MB.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def _is_new(connection: Connection) -> bool:
    """Return True if the last migration has been run. Their files are numbered."""
    last = max(path.name for path in (MIGRATIONS / "versions").glob("[0-9]*.py")).partition("_")[0]
    if not inspect(connection).has_table("alembic_version"):
        return False
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == last
