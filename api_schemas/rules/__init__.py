"""The rules of what cannot be combined in a job: `rule.py` has their form, `table.py` all of them and the queries."""
