"""`Client`: Octet's REST API as Python calls. Every answer is a model of `api_schemas`.

    with Client("http://127.0.0.1:8000") as octet:
        job = octet.submit({"name": "first", "model": {"preset": "gpt-tiny"}, ...})
        job = octet.wait(job.id, on_progress=lambda job: print(job.state, job.progress))

Every call is safe to repeat (a submission carries an Idempotency-Key), so the client repeats it for `patience_s` after a lost
connection, a 408 or a 5xx. `wait` and `follow=True` endure a server that is away for `reconnect_s`, long enough for a restart.

A call raises ApiError if the server refuses it, ConnectionFailed if no server answers, and UnexpectedAnswer if another does.
"""

import itertools
import random
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from octet.api_schemas import (
    Alert,
    Attempt,
    Checkpoint,
    CheckpointFile,
    Contract,
    ErrorCode,
    Event,
    Export,
    ExportSpec,
    Job,
    JobSpec,
    LogLine,
    MetricPoint,
    Page,
    Pool,
    ValidatedJob,
    explain,
)
from octet.api_schemas.catalog import ModelFamily, model_families
from octet.api_schemas.comparison import DEFAULT_TOLERANCE, MAX_POINTS, Comparison, ComparisonSpec
from octet.api_schemas.comparison_report import ComparisonDetails, ComparisonReport
from octet.api_schemas.curve import Curve
from octet.api_schemas.job_batch import SubmittedJobs
from octet.api_schemas.keys import ApiKey, KeyRotation, KeySpec, NewApiKey, SignIn
from octet.api_schemas.levels import LEVELS, Level
from octet.api_schemas.measured import Measurements
from octet.api_schemas.plan import Plan
from octet.api_schemas.planned_states import validated
from octet.api_schemas.quotas import TenantUse
from octet.api_schemas.rows import RowPage
from octet.client.compared import compare_jobs
from octet.client.connection import TRIED_AGAIN, Connection, delays_s, read, read_message, read_text
from octet.client.errors import AmbiguousJob, ApiError, DownloadFailed, SpecRefused, WaitTimeout

Item = TypeVar("Item")
Shown = TypeVar("Shown", bound=Contract)

MOST_JOBS_PER_PAGE = 100
MOST_MATCHES = 5
"""Jobs that are listed where a name or the beginning of an id has several."""
_ID_LENGTH, _DIGITS = 30, "0123456789abcdefghjkmnpqrstvwxyz"
_ID = re.compile(rf"job_[0-7][0-9a-hjkmnp-tv-z]{{{_ID_LENGTH - 5}}}")
_PREFIX = re.compile(r"job_[0-7][0-9a-hjkmnp-tv-z]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MOST_RECORDS_PER_PAGE = 1000
LONGEST_PLAN_S = 75.0
"""A server waits 30 s for the peaks of levels, and 30 s for those of changes."""


class Client:
    """A client of one server. Threads must not share it."""

    def __init__(
        self,
        url: str,
        api_key: str | Callable[[], str] | None = None,
        *,
        timeout_s: float = 10.0,
        patience_s: float = 2.0,
        reconnect_s: float = 60.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`url` is the server's root. `transport` replaces the network, as httpx defines it.

        api_key: a key or a token; a function is called before each request and returns the present one.
        """
        self._connection = Connection(url, api_key, timeout_s, transport)
        self._patience_s = patience_s
        self._reconnect_s = reconnect_s

    @property
    def url(self) -> str:
        return self._connection.url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def is_ready(self) -> bool:
        """Ask once whether the server takes jobs and has a dispatcher that runs them."""
        return self._connection.answers("/readyz")

    def why_not_ready(self) -> str | None:
        """Ask the same, and return what is missing in words; None if the server is ready."""
        try:
            self._connection.request("GET", "/readyz", patience_s=0)
        except ApiError as error:
            return error.problem.detail
        return None

    def submit(self, spec: JobSpec | Mapping[str, Any], idempotency_key: str | None = None) -> Job:
        """Submit a job; when this returns, it is stored. The same key and spec give the same job again for 24 hours."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        return read(Job, self._post("/v1/jobs", _document(spec), headers))

    def submit_all(
        self, spec: JobSpec | Mapping[str, Any], changes: Sequence[Mapping[str, Any]], idempotency_key: str | None = None
    ) -> tuple[Job, ...]:
        """Submit several jobs, all or none. changes: for each of them, a JSON merge patch (RFC 7396) of the spec."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        document = {"job": _document(spec), "changes": list(changes)}
        return read(SubmittedJobs, self._post("/v1/jobs/batch", document, headers)).jobs

    def validate(self, spec: JobSpec | Mapping[str, Any]) -> ValidatedJob:
        """Check a spec by the server's rules without submitting it; return the job that it would be."""
        return read(ValidatedJob, self._post("/v1/jobs/validate", _document(spec)))

    def plan(self, spec: JobSpec | Mapping[str, Any], levels: Sequence[str] = ()) -> Plan:
        """Return the bytes that a job would take, the pools that it fits, and what would make it fit.

        levels: at which it is planned, by default all. Each that shares no trace with another takes a server some seconds.
        """
        document = {"job": _document(spec), "levels": list(levels)}
        answer = self._connection.request(
            "POST", "/v1/plans", document=document, patience_s=self._patience_s, timeout_s=LONGEST_PLAN_S
        )
        return read(Plan, answer)

    def plans(self, spec: JobSpec | Mapping[str, Any], levels: Sequence[str] = ()) -> Iterator[Plan]:
        """Yield what `plan` returns as far as it is known: states at once, then with each peak, that of its level first."""
        document = {"job": _document(spec), "levels": list(levels)}
        lines = self._connection.lines("/v1/plans", document, patience_s=self._patience_s, timeout_s=LONGEST_PLAN_S)
        for line in lines:
            yield read_text(Plan, line)

    def job(self, job_id: str) -> Job:
        """Return a job as it is now."""
        return self._job(job_id, self._patience_s)

    def find(self, text: str) -> Job | None:
        """Return the job with this id or name, or the only one with an id that begins so; None if there is none.

        Raises AmbiguousJob, which lists them, for several.
        """
        if _ID.fullmatch(text):
            return self.job(text)
        found = list(self.jobs(name=text, limit=MOST_MATCHES + 1)) if _NAME.fullmatch(text) else []
        if not found and _PREFIX.fullmatch(text):
            # Ids sort by time and jobs are listed from the newest, so those with the prefix follow the next prefix.
            params = {"limit": str(MOST_MATCHES + 1)} | ({"after": above} if (above := _first_id_above(text)) else {})
            page = self._connection.request("GET", "/v1/jobs", params=params, patience_s=self._patience_s)
            found = [job for job in read(Page[Job], page).data if job.id.startswith(text)]
        if len(found) > 1:
            raise AmbiguousJob(text, found[:MOST_MATCHES], has_more=len(found) > MOST_MATCHES)
        return found[0] if found else None

    def jobs(
        self,
        *,
        state: str | None = None,
        pool: str | None = None,
        label: str | None = None,
        name: str | None = None,
        limit: int | None = None,
    ) -> Iterator[Job]:
        """Iterate over jobs, newest first; `label` is key:value. `limit` None means all."""
        wanted = {"state": state, "pool": pool, "label": label, "name": name}
        params = {key: value for key, value in wanted.items() if value is not None}
        params["limit"] = str(min(limit or MOST_JOBS_PER_PAGE, MOST_JOBS_PER_PAGE))
        return itertools.islice(self._items("/v1/jobs", Page[Job], params), limit)

    def rows(
        self,
        *,
        states: Sequence[str] = (),
        level: str | None = None,
        pool: str | None = None,
        label: str | None = None,
        search: str | None = None,
        limit: int = 20,
        offset: int = 0,
    ) -> RowPage:
        """Return a part of the list of jobs in compact rows, newest first, and the number of all that fit.

        `search` is a part of the name, `label` is key:value, and `limit` at most 100.
        """
        wanted = {"level": level, "pool": pool, "label": label, "q": search, "limit": limit, "offset": offset}
        params: dict[str, str | Sequence[str]] = {key: str(value) for key, value in wanted.items() if value is not None}
        params |= {"state": states} if states else {}
        return read(RowPage, self._connection.request("GET", "/v1/rows", params=params, patience_s=self._patience_s))

    def cancel(self, job_id: str, *, save: bool = True) -> Job:
        """Cancel a job: at once if it waits, after a checkpoint if it runs. save: False leaves that checkpoint out."""
        return read(Job, self._post(f"{_path(job_id)}/cancel{'' if save else '?save=false'}"))

    def pause(self, job_id: str) -> Job:
        """Pause a job: at once if it waits, after a checkpoint if it runs. It then holds no slots."""
        return read(Job, self._post(f"{_path(job_id)}/pause"))

    def resume(self, job_id: str) -> Job:
        """Put a paused job back into the queue. It goes on from its newest checkpoint."""
        return read(Job, self._post(f"{_path(job_id)}/resume"))

    def clone(self, job_id: str, patch: Mapping[str, Any] | None = None, idempotency_key: str | None = None) -> Job:
        """Submit a job's spec once more, as a job of its own.

        patch: fields to change, such as {"training": {"steps": 50}}; None as a value removes one.
        """
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        return read(Job, self._post(f"{_path(job_id)}/clone", dict(patch or {}), headers))

    def retry(self, job_id: str, *, steps: int | None = None) -> Job:
        """Put a job that failed or was cancelled back into the queue. It goes on from its newest checkpoint.

        steps: go on to this step, later than the last one; so does a job that has succeeded.
        """
        return read(Job, self._post(f"{_path(job_id)}/retry{'' if steps is None else f'?steps={steps}'}"))

    def change(self, job_id: str, patch: Mapping[str, Any]) -> Job:
        """Change a job's labels, and the priority of one that is not over: {"priority": 70, "labels": {"team": "research"}}.

        Labels that are left out stay; None as a value removes one. {"precision": {"level": "O2"}} lets it go on at another
        level, and {"resources": {"max_slot_hours": 20}} changes a limit.
        """
        answer = self._connection.request("PATCH", _path(job_id), document=dict(patch), patience_s=self._patience_s)
        return read(Job, answer)

    def delete(self, job_id: str) -> None:
        """Delete a job that is over, with its events, logs, curve and checkpoints."""
        self._connection.request("DELETE", _path(job_id), patience_s=self._patience_s)

    def delete_checkpoint(self, job_id: str, checkpoint_id: str) -> None:
        """Delete a checkpoint of a job that is over, with its files."""
        path = f"{_path(job_id)}/checkpoints/{quote(checkpoint_id, safe='')}"
        self._connection.request("DELETE", path, patience_s=self._patience_s)

    def delete_export(self, job_id: str, export_id: str) -> None:
        """Delete an export of a job that is over, with its files."""
        path = f"{_path(job_id)}/exports/{quote(export_id, safe='')}"
        self._connection.request("DELETE", path, patience_s=self._patience_s)

    def compare(self, spec: ComparisonSpec | Mapping[str, Any], idempotency_key: str | None = None) -> Comparison:
        """Submit a comparison: {"job": {…}, "levels": ["bf16-amp", "O2"], "seeds": 5}. It goes on without this client.

        The same key and spec give the same comparison again for 24 hours.
        """
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        if isinstance(spec, ComparisonSpec):  # without defaults: some follow from what an arm changes
            spec = spec.model_dump(mode="json", exclude_unset=True)
        document = dict(spec)
        return read(Comparison, self._post("/v1/comparisons", document, headers))

    def comparison(self, comparison_id: str) -> ComparisonDetails:
        """Return a comparison with its children and what they show so far."""
        return self._comparison(comparison_id, self._patience_s)

    def comparisons(self) -> Iterator[Comparison]:
        """Iterate over comparisons, newest first."""
        return self._items("/v1/comparisons", Page[Comparison])

    def wait_for_comparison(
        self, comparison_id: str, on_progress: Callable[[ComparisonDetails], None] | None = None, *, poll_s: float = 1.0
    ) -> ComparisonDetails:
        """Return a comparison once it is over; call `on_progress` with it at each look."""
        while True:
            found = self._comparison(comparison_id, self._reconnect_s)
            if on_progress is not None:
                on_progress(found)
            if found.state.is_terminal:
                return found
            time.sleep(poll_s)

    def pause_comparison(self, comparison_id: str) -> Comparison:
        """Pause a comparison with all of its children."""
        return read(Comparison, self._post(f"{_comparison_path(comparison_id)}/pause"))

    def resume_comparison(self, comparison_id: str) -> Comparison:
        """Let a paused comparison go on with all of its children."""
        return read(Comparison, self._post(f"{_comparison_path(comparison_id)}/resume"))

    def cancel_comparison(self, comparison_id: str, *, save: bool = True) -> Comparison:
        """Cancel a comparison with all of its children. save: False leaves their checkpoints out."""
        return read(Comparison, self._post(f"{_comparison_path(comparison_id)}/cancel{'' if save else '?save=false'}"))

    def delete_comparison(self, comparison_id: str) -> None:
        """Delete a comparison that is over, with its report. Its jobs stay."""
        self._connection.request("DELETE", _comparison_path(comparison_id), patience_s=self._patience_s)

    def compare_jobs(
        self, jobs: Sequence[Job], tolerance: float = DEFAULT_TOLERANCE
    ) -> tuple[ComparisonReport, tuple[str, ...]]:
        """Compare jobs that are over, paired where their seeds are equal; return also which cannot be paired, and why.

        The first job's arm is the baseline. Raises ValueError if they differ in nothing but seed and name.
        """
        over = [job for job in jobs if job.state.is_terminal]
        return compare_jobs(jobs, {job.id: self.curve(job.id, points=MAX_POINTS).evaluations for job in over}, tolerance)

    def attempts(self, job_id: str) -> Iterator[Attempt]:
        """Iterate over the job's attempts, in order."""
        return self._records(job_id, "attempts", Page[Attempt])

    def checkpoints(self, job_id: str) -> Iterator[Checkpoint]:
        """Iterate over the job's checkpoints, in order."""
        return self._records(job_id, "checkpoints", Page[Checkpoint])

    def checkpoint_files(self, job_id: str, checkpoint_id: str) -> Iterator[CheckpointFile]:
        """Iterate over a checkpoint's files, the manifest last."""
        return self._items(f"{_path(job_id)}/checkpoints/{quote(checkpoint_id, safe='')}/files", Page[CheckpointFile])

    def export(self, job_id: str, wanted: ExportSpec | Mapping[str, Any]) -> Job:
        """Export a job that has succeeded, by an attempt that takes no step. Returns the job, which is queued."""
        document = wanted.model_dump(mode="json") if isinstance(wanted, ExportSpec) else dict(wanted)
        return read(Job, self._post(f"{_path(job_id)}/exports", document))

    def exports(self, job_id: str) -> Iterator[Export]:
        """Iterate over the job's exports, in the order of their steps."""
        return self._records(job_id, "exports", Page[Export])

    def download(self, checkpoint: Checkpoint | Export, folder: str | Path) -> list[CheckpointFile]:
        """Write the files of a checkpoint or an export into a folder, which is made if it is missing; returns them.

        The manifest is written last, so a folder with one is complete. Raises DownloadFailed for content with another SHA-256
        than the server lists, and for a manifest that is not the one that was registered.
        """
        base = f"{_path(checkpoint.job_id)}/{checkpoint.object}s/{checkpoint.id}/files"
        files = list(self._items(base, Page[CheckpointFile]))
        if not files or files[-1].sha256 != checkpoint.sha256:
            raise DownloadFailed(f"{checkpoint.id}: the server lists another manifest than the one that was registered.")
        for file in files:
            place = _place_below(Path(folder), file.path)
            place.parent.mkdir(parents=True, exist_ok=True)
            unfinished = place.with_name(f"{place.name}.part")
            path = f"{base}/{quote(file.path)}"
            with unfinished.open("wb") as content:
                sha256 = self._connection.download(path, content, patience_s=self._patience_s)
            if sha256 != file.sha256:
                unfinished.unlink()
                raise DownloadFailed(
                    f"{file.path} of {checkpoint.id} arrived with SHA-256 {sha256}; expected {file.sha256}. Download it again; "
                    f"if that does not help, the {checkpoint.object} is damaged: use another."
                )
            unfinished.replace(place)
        return files

    def metrics(self, job_id: str, *, after: int = 0) -> Iterator[MetricPoint]:
        """Iterate over the job's curve: the steps later than `after`, in order."""
        return self._records(job_id, "metrics", Page[MetricPoint], after)

    def curve(self, job_id: str, *, points: int = 500, step_by: int | None = None) -> Curve:
        """Return the job's curve in at most `points` buckets, or in buckets of `step_by` steps, as columns."""
        params = {"points": str(points)} | ({} if step_by is None else {"step_by": str(step_by)})
        answer = self._connection.request("GET", f"{_path(job_id)}/curve", params=params, patience_s=self._patience_s)
        return read(Curve, answer)

    def measurements(self, job_id: str) -> Measurements:
        """Return what rank 0 last measured: size, memory by class, worst layers. Raises ApiError (404) before the first."""
        answer = self._connection.request("GET", f"{_path(job_id)}/measurements", patience_s=self._patience_s)
        return read(Measurements, answer)

    @staticmethod
    def check(spec: JobSpec | Mapping[str, Any]) -> ValidatedJob:
        """Check a spec without a server, as `validate` does but for its pools and data. Raises SpecRefused."""
        try:
            return validated(spec if isinstance(spec, JobSpec) else JobSpec.model_validate(dict(spec)))
        except ValidationError as error:
            raise SpecRefused("the spec", explain(error, JobSpec)) from error

    @staticmethod
    def models() -> Iterator[ModelFamily]:
        """Iterate over the families of models, with presets and their bytes at each level. No server is asked."""
        return iter(model_families())

    @staticmethod
    def levels() -> Iterator[Level]:
        """Iterate over the precision levels and what each stores in what. No server is asked."""
        return iter(LEVELS.values())

    def pools(self) -> Iterator[Pool]:
        """Iterate over the pools, with their slots and queues."""
        return self._items("/v1/pools", Page[Pool])

    def usage(self) -> Iterator[TenantUse]:
        """Iterate over tenants with what they use of their quotas: the key's own, or all of them for the operator."""
        return self._items("/v1/usage", Page[TenantUse])

    def alerts(self) -> list[Alert]:
        """Return the alerts that fire, critical ones first, at most a hundred."""
        return list(read(Page[Alert], self._connection.request("GET", "/v1/alerts", patience_s=self._patience_s)).data)

    def find_alerts(self) -> list[Alert] | None:
        """Return the alerts that fire, or None from a server of an older version, which lists none."""
        try:
            return self.alerts()
        except ApiError as error:
            if error.problem.code is ErrorCode.NOT_FOUND:
                return None
            raise

    def sign_in(self) -> SignIn:
        """Return where people sign in to the server. Raises ApiError if it has no identity provider."""
        return read(SignIn, self._connection.request("GET", "/v1/sign-in", patience_s=self._patience_s))

    def create_key(self, wanted: KeySpec) -> NewApiKey:
        """Make an API key. Its secret is in this answer alone, so a lost answer is not asked for again: list, and revoke."""
        document = wanted.model_dump(mode="json")
        return read(NewApiKey, self._connection.request("POST", "/v1/keys", document=document, patience_s=0))

    def keys(self) -> Iterator[ApiKey]:
        """Iterate over API keys, newest first, without their secrets."""
        return self._items("/v1/keys", Page[ApiKey])

    def rotate_key(self, key_id: str, wanted: KeyRotation | None = None) -> NewApiKey:
        """Make a key in the place of another one, which works for the overlap: a day by default."""
        document = (wanted or KeyRotation()).model_dump(mode="json")
        path = f"/v1/keys/{quote(key_id, safe='')}/rotate"
        return read(NewApiKey, self._connection.request("POST", path, document=document, patience_s=0))

    def revoke_key(self, key_id: str) -> ApiKey:
        """Revoke a key. Nothing accepts it a second later."""
        return read(ApiKey, self._post(f"/v1/keys/{quote(key_id, safe='')}/revoke"))

    def events(self, job_id: str, *, follow: bool = False, after: int = 0) -> Iterator[Event]:
        """Iterate over what happened later than event number `after`, in order; with `follow`, until the job is over."""
        if follow:
            return self._follow(job_id, "events", Event, after)
        return self._records(job_id, "events", Page[Event], after)

    def logs(
        self,
        job_id: str,
        *,
        follow: bool = False,
        rank: int | None = None,
        attempt_id: str | None = None,
        since: datetime | None = None,
        tail: int | None = None,
    ) -> Iterator[LogLine]:
        """Iterate over log lines in order: of all ranks and attempts, or of one; with `follow`, until the job is over.

        since: only lines logged then or later, with a time zone. tail: begin with so many of the last lines.
        """
        given = {"rank": rank, "attempt_id": attempt_id, "since": since and since.isoformat(), "tail": tail}
        params = {name: str(value) for name, value in given.items() if value is not None}
        last = 0
        if params or not follow:
            for line in self._records(job_id, "logs", Page[LogLine], params=params):
                yield line
                last = line.seq
        for line in self._follow(job_id, "logs", LogLine, after=last) if follow else ():
            is_wanted = rank in {None, line.rank} and attempt_id in {None, line.attempt_id}
            if is_wanted and (since is None or line.at >= since):
                yield line

    def wait(
        self,
        job_id: str,
        timeout_s: float | None = None,
        on_progress: Callable[[Job], None] | None = None,
        *,
        poll_s: float = 0.5,
    ) -> Job:
        """Return the job once it is over; call `on_progress` each time it has changed. Raises WaitTimeout after `timeout_s`."""
        started = time.monotonic()
        seen: Job | None = None
        while True:
            job = self._job(job_id, self._reconnect_s)
            if job != seen and on_progress is not None:
                on_progress(job)
            if job.state.is_terminal:
                return job
            if timeout_s is not None and time.monotonic() - started >= timeout_s:
                raise WaitTimeout(job, timeout_s)
            seen = job
            time.sleep(poll_s)

    def _job(self, job_id: str, patience_s: float) -> Job:
        return read(Job, self._connection.request("GET", _path(job_id), patience_s=patience_s))

    def _comparison(self, comparison_id: str, patience_s: float) -> ComparisonDetails:
        answer = self._connection.request("GET", _comparison_path(comparison_id), patience_s=patience_s)
        return read(ComparisonDetails, answer)

    def _post(self, path: str, document: Any = None, headers: Mapping[str, str] | None = None) -> httpx.Response:
        return self._connection.request("POST", path, document=document, headers=headers, patience_s=self._patience_s)

    def _records(
        self, job_id: str, part: str, page_type: type[Page[Item]], after: int = 0, params: Mapping[str, str] | None = None
    ) -> Iterator[Item]:
        query = {"limit": str(MOST_RECORDS_PER_PAGE), **(params or {})} | ({"after": str(after)} if after else {})
        return self._items(f"{_path(job_id)}/{part}", page_type, query)

    def _items(self, path: str, page_type: type[Page[Item]], params: Mapping[str, str] | None = None) -> Iterator[Item]:
        query = dict(params or {})
        while True:
            answer = self._connection.request("GET", path, params=query, patience_s=self._patience_s)
            page = read(page_type, answer)
            yield from page.data
            if not page.has_more or page.last_id is None:
                return
            query["after"] = page.last_id

    def _follow(self, job_id: str, part: str, item_type: type[Shown], after: int) -> Iterator[Shown]:
        """Yield items as they come. The server ends the stream when an ended job has nothing more, or when it stops."""
        last_id, was_over = str(after) if after else "", False
        delays = delays_s(self._patience_s)
        while True:
            try:
                for message in self._connection.stream(f"{_path(job_id)}/{part}", last_id):
                    yield read_message(item_type, message)
                    last_id, delays = message.id, delays_s(self._reconnect_s)
            except TRIED_AGAIN as error:
                self._connection.pause(delays, error)
                continue
            if was_over:
                return
            # Only a stream that was opened after the end of the job is certain to be complete.
            was_over = self._job(job_id, self._reconnect_s).state.is_terminal
            if not was_over:
                time.sleep(random.uniform(0.1, 0.3))


def _document(spec: JobSpec | Mapping[str, Any]) -> Any:
    return spec.model_dump(mode="json") if isinstance(spec, JobSpec) else dict(spec)


def _comparison_path(comparison_id: str) -> str:
    return f"/v1/comparisons/{quote(comparison_id, safe='')}"


def _place_below(folder: Path, path: str) -> Path:
    """The place of a listed file. Raises DownloadFailed for a path that leads out of the folder."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts:
        raise DownloadFailed(f"the server lists the file {path!r}, which does not lie in the checkpoint's folder.")
    return folder.joinpath(*parts)


def _first_id_above(prefix: str) -> str | None:
    """Return the least id that sorts above all ids that begin so; None if all of them sort below."""
    kept = prefix.rstrip("z")
    if kept in {"job_", "job_7"}:
        return None
    return f"{kept[:-1]}{_DIGITS[_DIGITS.index(kept[-1]) + 1]}".ljust(_ID_LENGTH, "0")


def _path(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}"
