"""All SQL of the control plane, by what it is about. Plain functions; the session, and its transaction, is the caller's."""

from service.store import ids, jobs, queue, records

__all__ = ["ids", "jobs", "queue", "records"]
