"""Runs Alembic from code: each process brings the database up to date when it starts."""

from pathlib import Path

from sqlalchemy import Connection, inspect, text

MIGRATIONS = Path(__file__).with_name("migrations")


class NewerSchema(RuntimeError):
    """A newer version of Octet has migrated the database; this one cannot use it. The message says what to do."""


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Run the migrations up to `revision` in the caller's transaction. Raises NewerSchema."""
    if inspect(connection).has_table("alembic_version"):
        found = check(connection)
        if revision == "head" and found == known_revisions()[-1]:
            return
    # A server that has nothing to migrate does without Alembic's 11 MB.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def check(connection: Connection) -> str | None:
    """Return the last migration that was run, None for none. Raises NewerSchema for one that this version does not have."""
    found: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    known = known_revisions()
    if found is not None and found not in known:
        raise NewerSchema(
            f"the database has schema {found!r}, and this version of Octet knows schemas up to {known[-1]!r}: a newer version "
            "has migrated it. Start that version here too, or put back the copy of the database from before the upgrade."
        )
    return found


def known_revisions() -> list[str]:
    """List the migrations of this version, the last one last. Their files are numbered."""
    return sorted(path.name.partition("_")[0] for path in (MIGRATIONS / "versions").glob("[0-9]*.py"))
