"""All SQL of the control plane, in plain functions. The caller owns the session and with it the transaction."""

from octet.service.store import (
    alerts,
    audit,
    comparisons,
    curves,
    ids,
    job_queries,
    jobs,
    keys,
    queue,
    records,
    reporting,
    rows,
    tallies,
    use,
)

__all__ = [
    "alerts",
    "audit",
    "comparisons",
    "curves",
    "ids",
    "job_queries",
    "jobs",
    "keys",
    "queue",
    "records",
    "reporting",
    "rows",
    "tallies",
    "use",
]
