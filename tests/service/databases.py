"""Which databases a test runs on by default."""

import pytest

ON_SQLITE = pytest.mark.parametrize(
    "database_url",
    ["sqlite", pytest.param("postgres", marks=(pytest.mark.postgres, pytest.mark.matrix))],
    indirect=True,
)
"""For what no database can change, and whose statements other tests send to both: PostgreSQL only in `make test-matrix`."""
