"""The schema of the first release. `octet.service.db.migrate` makes a new database from the tables, so this runs nothing."""

revision = "0024"
down_revision = None
branch_labels = None
depends_on = None
