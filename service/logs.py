"""The log of a process: text for a person at a terminal, or one JSON object a line for what collects logs.

A line in JSON says which request, trace, principal, job and attempt it is about, where that is known: from what `log_fields`
has bound around the code that logs, or from `extra` of the call. Lines of text say what their words say.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

from octet.api_schemas.trace_context import TraceContext

LogFormat = Literal["text", "json"]
FIELDS = ("request_id", "trace_id", "span_id", "principal", "job_id", "attempt_id")

_bound: ContextVar[Mapping[str, str]] = ContextVar("octet_log_fields")


def bound_fields() -> Mapping[str, str]:
    """Return the fields of lines that are logged here."""
    return _bound.get({})


@contextmanager
def log_fields(fields: Mapping[str, str]) -> Iterator[None]:
    """Add fields to the lines that are logged in the block, and in threads and tasks that copy its context."""
    token = _bound.set({**bound_fields(), **fields})
    try:
        yield
    finally:
        _bound.reset(token)


def add_log_fields(fields: Mapping[str, str]) -> None:
    """Add fields until the task ends, or the block of `log_fields` in which this is called."""
    _bound.set({**bound_fields(), **fields})


def fields_of_trace(trace: TraceContext | None) -> dict[str, str]:
    return {} if trace is None else {"trace_id": trace.trace_id, "span_id": trace.span_id}


def fields_of_job(job_id: str, attempt_id: str | None, traceparent: str | None) -> dict[str, str]:
    """Return the fields of lines about a job. traceparent: the one of the request that submitted it."""
    trace = None if traceparent is None else TraceContext.parse(traceparent)
    return {"job_id": job_id, **({} if attempt_id is None else {"attempt_id": attempt_id}), **fields_of_trace(trace)}


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, message, the fields that are known, and an exception."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **bound_fields(),
        }
        line |= {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return json.dumps(line, default=str)
