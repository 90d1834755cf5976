"""Which databases a test runs on by default, and the schemas of every release."""

from pathlib import Path

import pytest

DATABASES = ["sqlite", pytest.param("postgres", marks=(pytest.mark.postgres, pytest.mark.system))]
"""For tests of the service: SQLite in `make test`, PostgreSQL in `make test-system`."""
ON_SQLITE = pytest.mark.parametrize(
    "database_url",
    ["sqlite", pytest.param("postgres", marks=(pytest.mark.postgres, pytest.mark.matrix))],
    indirect=True,
)
"""For what no database can change, and whose statements other tests send to both: PostgreSQL only in `make test-matrix`."""
ON_BOTH = pytest.mark.parametrize(
    "database_url", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True
)
"""For the test that stands for the others: both databases in `make test`."""


def schema_file(revision: str, dialect: str) -> Path:
    """Return the file with the statements, one a line, that made a database of this schema."""
    return Path(__file__).with_name("schemas") / f"{revision}.{dialect}.sql"
