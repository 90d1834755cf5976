"""Copy a whole database into one file while servers use it, and fill a database from such a file.

A backup is a file of SQLite with our own tables, whichever kind of database it was made of. It therefore restores into either
kind, and an installation goes from `octet serve` to a cluster in the same way.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, Table, delete, inspect, select
from sqlalchemy.exc import DatabaseError, IntegrityError

from octet.service.db.bulk import Rows
from octet.service.db.engine import Database
from octet.service.db.migrate import check, known_revisions
from octet.service.db.tables import Base, TallyRow

_ROWS_AT_ONCE = 512
_COUNTED = Base.metadata.tables[TallyRow.__tablename__]
"""Triggers write this table while the others are filled, so its rows are replaced at the end."""
_TABLES = [*(table for table in Base.metadata.sorted_tables if table is not _COUNTED), _COUNTED]


def back_up(database: Database, path: Path) -> int:
    """Write one consistent state of a database into a new file that its owner alone can read. Returns the number of rows.

    The file is complete or not there. Raises FileExistsError if there is one, FileNotFoundError without a database,
    ValueError for one without tables or of an older version, and NewerSchema, a RuntimeError, for one of a newer version.
    """
    if database.path is not None and not database.path.is_file():
        raise FileNotFoundError(f"there is no database {database.path}. Name the server's folder with --data-dir.")
    if path.exists():
        raise FileExistsError(f"{path} exists. Name a file that does not exist yet, or move it away.")
    if not path.resolve().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.resolve().parent}. Make it, or name a file in one that exists.")
    with tempfile.TemporaryDirectory(dir=path.resolve().parent, prefix=f".{path.name}-") as folder:
        partial = Path(folder, "octet.db")
        with _closing(Database(f"sqlite:///{partial}")) as copy, database.read() as session:
            source = session.connection()
            _require_our_schema(source, database.name)
            copy.migrate()
            with copy.write_rows() as target:
                num_rows = _copy_rows(source, target)
        partial.chmod(0o600)
        _flush(partial)
        partial.rename(path)
        _flush(path.resolve().parent)
    return num_rows


def restore(path: Path, database: Database) -> int:
    """Fill a database that has no rows from a backup of this version or an older one. Returns the number of rows.

    All rows are there at the end, or none. Raises ValueError if the file is no backup or damaged, or the database has rows,
    OSError if the file cannot be read, and NewerSchema, a RuntimeError, for a backup of a newer version.
    """
    with tempfile.TemporaryDirectory(prefix="octet-restore-") as folder:
        # The migrations change a backup of an older version, so they get a copy of it.
        copied = Path(shutil.copy(path, folder))
        with _closing(Database(f"sqlite:///{copied}")) as backup:
            _require_backup(backup, path)
            backup.migrate()
            database.migrate()
            try:
                with backup.read() as session, database.write_rows() as target:
                    _require_empty(target, database.name)
                    return _copy_rows(session.connection(), target)
            except IntegrityError as error:
                raise ValueError(f"{path} is damaged: {error.orig}. Nothing was restored; use another backup.") from error


def _copy_rows(source: Connection, target: Connection) -> int:
    num_rows = 0
    for table in _TABLES:
        if table is _COUNTED:
            target.execute(delete(_COUNTED))
        rows = Rows(table)
        result = source.execution_options(yield_per=_ROWS_AT_ONCE).execute(select(table))
        for part in result.partitions():
            rows.execute(target, [tuple(row) for row in part])
            num_rows += len(part)
    return num_rows


def _require_our_schema(source: Connection, name: str) -> None:
    if not inspect(source).has_table("alembic_version"):
        raise ValueError(f"the database {name} has no tables of Octet. Name the one that a server uses.")
    found, ours = check(source), known_revisions()[-1]
    if found != ours:
        raise ValueError(
            f"the database {name} has schema {found!r}, and this version of Octet has {ours!r}. Back it up with the version "
            "whose server uses it, or start this version's server once, which migrates it."
        )


def _require_backup(backup: Database, path: Path) -> None:
    try:
        with backup.read() as session:
            if inspect(session.connection()).has_table("alembic_version"):
                return
    except DatabaseError as error:
        raise ValueError(f"{path} is no backup: {error.orig}. Name a file that `octet backup` has written.") from error
    raise ValueError(f"{path} is no backup: it has no tables of Octet. Name a file that `octet backup` has written.")


def _require_empty(target: Connection, name: str) -> None:
    filled = [table.name for table in _TABLES if table is not _COUNTED and _has_rows(target, table)]
    if filled:
        raise ValueError(
            f"the database {name} has rows in {', '.join(filled)}, and a backup would mix with them. Restore into an empty "
            "database: name another with --data-dir or --database-url-file."
        )


def _has_rows(connection: Connection, table: Table) -> bool:
    return connection.execute(select(table).limit(1)).first() is not None


@contextmanager
def _closing(database: Database) -> Iterator[Database]:
    """Close the database at the end, so that all of it is in its one file."""
    try:
        yield database
    finally:
        database.close()


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
