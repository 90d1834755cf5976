"""The ASGI application that ranks report to: `POST /internal/v1/attempts/{attempt_id}/reports`. Not for people.

The token is made at launch and works for one attempt.
"""

import hashlib
import hmac
import re
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import Request, Response, Security
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.datastructures import QueryParams
from starlette.types import ASGIApp, Receive, Scope, Send

from octet.api_schemas import DesiredState, ReportBatch, ReportReply
from octet.service import store
from octet.service.db.engine import Database
from octet.service.db.group_commit import GroupCommit
from octet.service.errors import MethodNotAllowed, NotFound, ServiceError, StaleAttempt, Unauthenticated
from octet.service.http.bodies import parse_json, whole_body
from octet.service.http.guards import refuse_unknown
from octet.service.http.problems import answer_error, answers
from octet.service.ingest.apply import Applied, apply_all
from octet.service.ingest.batches import SentBatch, read_batch
from octet.service.ingest.decide import is_hash_of
from octet.service.store.ids import is_id
from octet.service.telemetry.control_plane import Telemetry

PATH = "/internal/v1/attempts/{attempt_id}/reports"
MAX_WEIGHT = 2000
"""The most of one transaction: a batch weighs 20 and one for each report. It takes about a tenth of a second, and a
batch that arrives meanwhile waits for so long."""

_BEARER = Security(HTTPBearer(auto_error=False, scheme_name="Attempt token", description="Made at launch."))
_PATH = re.compile(PATH.replace("{attempt_id}", "([^/]+)"))


class _Reply(msgspec.Struct):
    """The fields of `ReportReply`, which pydantic takes ten times as long to write."""

    desired: DesiredState
    lease_s: float
    acknowledged_seq: int


_encode = msgspec.json.Encoder().encode


class Ingest:
    """The application. `LimitBodies` has to be in front of it."""

    def __init__(self, database: Database, lease_s: float, telemetry: Telemetry, wake: Callable[[], None]) -> None:
        """lease_s: the time that a report renews its attempt's lease for. wake: called when an attempt is over."""
        self._database, self._lease_s = database, lease_s
        self._telemetry, self._wake = telemetry, wake
        self.tokens = AttemptTokens(database)
        self.commits = GroupCommit[SentBatch, Applied](
            "octet-reports",
            self._apply,
            max_weight=MAX_WEIGHT,
            weigh=lambda sent: 20 + len(sent.batch.reports),
            owner=lambda sent: sent.attempt_id,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._answer(scope, receive)
        except Exception as error:  # noqa: BLE001  each is answered, and logged unless it is expected
            response = answer_error(Request(scope), error)
        await response(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> Response:
        attempt_id = _attempt_of(scope)
        if scope["query_string"]:
            refuse_unknown(QueryParams(scope["query_string"]), known=[])
        headers: dict[bytes, bytes] = dict(scope["headers"])
        token = _token_of(headers)
        # Before anything else of the request: without the token nobody learns which attempts there are.
        if not await self.tokens.verify(attempt_id, token):
            self._telemetry.fenced_writes.inc()
            raise Unauthenticated("the token is not this attempt's; end this process")
        content_type = headers.get(b"content-type", b"").decode("latin-1")
        batch = parse_json(await whole_body(receive), content_type, ReportBatch, read_batch)
        try:
            applied = await self.commits.submit_async(SentBatch(attempt_id, token, batch))
        except (StaleAttempt, Unauthenticated):
            self._telemetry.fenced_writes.inc()
            raise
        self._observe(applied)
        # To ranks both are one order, and ranks that an earlier version started know only the one.
        desired = DesiredState.PAUSE if applied.desired is DesiredState.YIELD else applied.desired
        reply = _Reply(desired, applied.lease_s, applied.acknowledged_seq)
        return Response(_encode(reply), media_type="application/json")

    def _apply(self, sent: Sequence[SentBatch]) -> "list[Applied | ServiceError]":
        with self._database.write_rows() as connection:
            return apply_all(connection, sent, self._lease_s, partial(self._database.now, connection))

    def _observe(self, applied: Applied) -> None:
        self._telemetry.observe_report(applied.queue_wait_s, applied.phase_s)
        if applied.finished:
            self._wake()


def _attempt_of(scope: Scope) -> str:
    found = _PATH.fullmatch(scope["path"])
    if found is None:
        raise NotFound(f"there is nothing at {scope['path']}")
    if scope["method"] != "POST":
        raise MethodNotAllowed(f"{scope['method']} is not possible on {scope['path']}")
    return found[1]


def _token_of(headers: dict[bytes, bytes]) -> str:
    scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise Unauthenticated("the attempt's token is needed: send 'Authorization: Bearer <token>'")
    return token


def route_to(ingest: ASGIApp) -> APIRoute:
    """Mount the application at its path, where FastAPI's part is the description in the OpenAPI document."""
    route = APIRoute(
        PATH,
        _described,
        methods=["POST"],
        operation_id="report",
        name="report",
        tags=["internal"],
        dependencies=[_BEARER],
        responses=answers(400, 401, 404, 409, 413, 421, 422, 503),
    )
    route.app = ingest
    return route


async def _described(attempt_id: str, batch: ReportBatch) -> ReportReply:
    """Apply one rank's next reports and renew the lease. The answer says what is wanted of the job."""
    raise NotImplementedError("the application answers")


TOKENS_KEPT = 10_000
_THREADS = 8


class AttemptTokens:
    """The tokens that one process has seen: one that was an attempt's once needs no query for its next batch.

    Whether the attempt still counts is decided where the batch is applied. Queries have threads of their own:
    readers cannot keep a rank from its lease.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._hashes: dict[str, bytes] = {}
        self._threads = CapacityLimiter(_THREADS)

    async def verify(self, attempt_id: str, token: str) -> bool:
        """Return True if the token was made at the launch of this attempt. Raises the database's errors."""
        return self.is_remembered(attempt_id, token) or await run_sync(self._look_up, attempt_id, token, limiter=self._threads)

    def is_remembered(self, attempt_id: str, token: str) -> bool:
        """Return True if `verify` has found this token to be the attempt's."""
        return hmac.compare_digest(self._hashes.get(attempt_id, b""), _hash(token))

    def _look_up(self, attempt_id: str, token: str) -> bool:
        with self._database.read() as session:
            attempt = store.jobs.find_attempt(session, attempt_id) if is_id("att", attempt_id) else None
            if not is_hash_of(attempt.token_hash if attempt is not None else None, token):
                return False
        while len(self._hashes) >= TOKENS_KEPT:
            self._hashes.pop(next(iter(self._hashes)), None)
        self._hashes[attempt_id] = _hash(token)
        return True


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
