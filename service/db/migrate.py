"""Brings a database to this version's schema: each process does so when it starts.

`tables` is the schema. A new database is made from it; one of an older release is upgraded by Alembic's migrations. Whoever
changes a table adds the next file to `migrations/versions` and runs `make snapshots`, which keeps the new schema for the tests.
"""

from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import Connection, Dialect, inspect, text
from sqlalchemy.schema import CreateIndex, CreateTable

from octet.service.db.tables import Base
from octet.service.db.triggers import triggers

MIGRATIONS = Path(__file__).with_name("migrations")


class NewerSchema(RuntimeError):
    """A newer version of Octet has migrated the database; this one cannot use it. The message says what to do."""


def upgrade(connection: Connection) -> None:
    """Make the tables, or run the migrations that are missing, in the caller's transaction. Raises NewerSchema."""
    if not inspect(connection).has_table("alembic_version"):
        for statement in statements(connection.dialect):
            connection.exec_driver_sql(statement)
        return
    if check(connection) == known_revisions()[-1]:
        return
    # Alembic takes 11 MB of memory, and most starts have nothing to migrate.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def statements(dialect: Dialect) -> Iterator[str]:
    """Yield the statements that make an empty database one of this version."""
    for table in Base.metadata.sorted_tables:
        yield str(CreateTable(table).compile(dialect=dialect))
        for index in sorted(table.indexes, key=lambda index: str(index.name)):
            yield str(CreateIndex(index).compile(dialect=dialect))
    yield from triggers(dialect.name)
    yield _VERSION_TABLE
    yield f"INSERT INTO alembic_version VALUES ('{known_revisions()[-1]}')"


_VERSION_TABLE = (
    "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL, CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))"
)
"""Alembic looks for the last migration here."""


def check(connection: Connection) -> str | None:
    """Return the last migration that was run, None for none. Raises NewerSchema for one that this version does not have yet."""
    found: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    known = known_revisions()
    if found is not None and found < known[0]:
        raise RuntimeError(
            f"the database has schema {found!r}, from before the first release, and this version of Octet knows schemas from "
            f"{known[0]!r}. Begin with a new database: name another one, or move this one away."
        )
    if found is not None and found not in known:
        raise NewerSchema(
            f"the database has schema {found!r}, and this version of Octet knows schemas up to {known[-1]!r}: a newer version "
            "has migrated it. Start that version here too, or put back the copy of the database from before the upgrade."
        )
    return found


def known_revisions() -> list[str]:
    """List the migrations of this version, the last one last. Their files are numbered."""
    return sorted(path.name.partition("_")[0] for path in (MIGRATIONS / "versions").glob("[0-9]*.py"))
