"""The database: tables, migrations, transactions."""
