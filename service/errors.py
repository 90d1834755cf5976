"""The errors that callers get to see. Each has an HTTP status and a stable code; one handler renders all of them.

ServiceError
├── InvalidRequest 422      the request cannot be accepted; `errors` names the fields
│   └── IdempotencyMismatch 422
├── InvalidJson 400, PayloadTooLarge 413, WrongHost 421
├── Unauthenticated 401, Forbidden 403, NotFound 404, MethodNotAllowed 405
├── IllegalTransition 409   the job's state does not allow the action
├── StaleAttempt 409        the writer is not the job's current attempt
├── SequenceGap 409         the report before this one is missing
├── TooManyRequests 429     more than one tenant may send or have at once; it may try again
└── NotReady 503            the database does not answer, or no dispatcher leads
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from octet.api_schemas import ErrorCode, Problem, Violation

MOST_VIOLATIONS = 100
"""A request may break many rules at once, and each takes 0.1 ms and 150 bytes to explain."""


class ServiceError(Exception):
    """Base of the tree above."""

    status: ClassVar[int] = 500
    code: ClassVar[ErrorCode] = ErrorCode.INTERNAL
    title: ClassVar[str] = "Internal error"
    headers: Mapping[str, str] = MappingProxyType({})

    def __init__(self, detail: str, errors: tuple[Violation, ...] = ()) -> None:
        super().__init__(detail)
        self.detail = detail
        self.errors = errors

    def problem(self, instance: str | None = None) -> Problem:
        """Build the document that the client gets."""
        return Problem(
            title=self.title,
            status=self.status,
            detail=self.detail,
            code=self.code,
            instance=instance,
            errors=self.errors,
        )


class InvalidRequest(ServiceError):
    status, code, title = 422, ErrorCode.INVALID_REQUEST, "Invalid request"

    @classmethod
    def of(cls, violations: tuple[Violation, ...], num_left_out: int = 0) -> "InvalidRequest":
        """Build the error. Its detail is the first violation, in one sentence. num_left_out: how many more there are."""
        first, num_more = violations[0], len(violations) - 1
        where = first.field or "the document"
        more = f" ({num_more} more in errors)" if num_more else ""
        if num_left_out:
            more = f" ({num_more + num_left_out} more, {num_more} of them in errors)"
        return cls(f"{where}: got {first.got}. {first.message}{more}", violations)


class IdempotencyMismatch(InvalidRequest):
    code, title = ErrorCode.IDEMPOTENCY_MISMATCH, "Idempotency key used for another body"


class EntrypointNotAllowed(InvalidRequest):
    code, title = ErrorCode.ENTRYPOINT_NOT_ALLOWED, "The pool runs no models of users"


class InvalidJson(ServiceError):
    status, code, title = 400, ErrorCode.INVALID_JSON, "The body is not JSON"


class PayloadTooLarge(ServiceError):
    status, code, title = 413, ErrorCode.PAYLOAD_TOO_LARGE, "Payload too large"


class WrongHost(ServiceError):
    status, code, title = 421, ErrorCode.WRONG_HOST, "Misdirected request"


class Unauthenticated(ServiceError):
    status, code, title = 401, ErrorCode.UNAUTHENTICATED, "Not authenticated"
    headers = MappingProxyType({"WWW-Authenticate": "Bearer"})


class Forbidden(ServiceError):
    status, code, title = 403, ErrorCode.FORBIDDEN, "Not allowed for this key"


class NotFound(ServiceError):
    status, code, title = 404, ErrorCode.NOT_FOUND, "Not found"


class MethodNotAllowed(ServiceError):
    status, code, title = 405, ErrorCode.METHOD_NOT_ALLOWED, "Method not allowed"


class IllegalTransition(ServiceError):
    status, code, title = 409, ErrorCode.ILLEGAL_TRANSITION, "Not possible in this state"


class StaleAttempt(ServiceError):
    status, code, title = 409, ErrorCode.STALE_ATTEMPT, "Stale attempt"


class SequenceGap(ServiceError):
    status, code, title = 409, ErrorCode.SEQUENCE_GAP, "A report is missing"


class TooManyRequests(ServiceError):
    """A refusal that ends by itself."""

    status, code, title = 429, ErrorCode.TOO_MANY_REQUESTS, "Too many requests"

    def __init__(self, detail: str, retry_after_s: float) -> None:
        super().__init__(detail)
        self.headers = {"Retry-After": str(math.ceil(retry_after_s))}


class NotReady(ServiceError):
    status, code, title = 503, ErrorCode.NOT_READY, "Not ready"
    headers = MappingProxyType({"Retry-After": "2"})
