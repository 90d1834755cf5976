"""All SQL of the control plane, in plain functions. The caller owns the session and with it the transaction."""

from service.store import curves, ids, jobs, queue, records, reporting, shown, tallies

__all__ = ["curves", "ids", "jobs", "queue", "records", "reporting", "shown", "tallies"]
