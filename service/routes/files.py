"""The files of a job's checkpoints: their list, and each as a download; and how a checkpoint is deleted."""

import os
import weakref
from typing import Annotated

from fastapi import APIRouter, Path
from fastapi.responses import FileResponse
from starlette.types import Receive, Scope, Send

from octet.api_schemas import CheckpointFile, Page
from octet.service import store
from octet.service.db.tables import CheckpointRow
from octet.service.deps import AppContext, AppContextDep, JobIdDep, VisibleTenantDep
from octet.service.errors import NotFound
from octet.service.http.pages import page_of
from octet.service.http.problems import Answers, answers
from octet.service.http.streams import while_the_key_works
from octet.service.jobs import checkpoint_files, commands
from octet.service.routes.job_views import existing_job
from octet.service.store.records import Saved

router = APIRouter(prefix="/v1/jobs/{job_id}/checkpoints/{name}", tags=["records"])

CheckpointName = Annotated[str, Path(max_length=31, description="the checkpoint's id, or step_ and ten digits")]
_CONTENT: Answers = {200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}}


class OpenFile(FileResponse):
    """Sends a file that is open, whatever its path leads to meanwhile, and closes it.

    It breaks off once the key of the request ends, and so it does not pass for whole.
    """

    def __init__(self, descriptor: int) -> None:
        self._close = weakref.finalize(self, os.close, descriptor)  # also if nobody asks for the answer any more
        super().__init__(f"/dev/fd/{descriptor}", media_type="application/octet-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_the_key_works(scope, super().__call__(scope, receive, send))
        finally:
            self._close()


@router.get("/files", operation_id="list_checkpoint_files", responses=answers(404, 422))
def list_files(
    job_id: JobIdDep, name: CheckpointName, context: AppContextDep, tenant: VisibleTenantDep
) -> Page[CheckpointFile]:
    """All files of a checkpoint, each with its SHA-256. 404 where the server cannot read them."""
    files = checkpoint_files.files_of(context.settings, find_saved(context, CheckpointRow, job_id, name, tenant))
    return page_of(files, len(files), lambda file: file.path)


@router.get(
    "/files/{path:path}",
    operation_id="get_checkpoint_file",
    response_class=FileResponse,
    responses=answers(404, 422) | _CONTENT,
)
def get_file(
    job_id: JobIdDep,
    name: CheckpointName,
    path: Annotated[str, Path(max_length=1024)],
    context: AppContextDep,
    tenant: VisibleTenantDep,
) -> FileResponse:
    """The content of a file that the list has."""
    return OpenFile(
        checkpoint_files.open_listed(context.settings, find_saved(context, CheckpointRow, job_id, name, tenant), path)
    )


@router.delete("", status_code=204, operation_id="delete_checkpoint", responses=answers(404, 409, 422))
def delete(job_id: JobIdDep, name: CheckpointName, context: AppContextDep, tenant: VisibleTenantDep) -> None:
    """Delete a checkpoint of a job that is over. Its files go within a minute."""
    delete_saved(context, CheckpointRow, job_id, name, tenant)


def delete_saved(context: AppContext, table: type[Saved], job_id: str, name: str, tenant: str | None) -> None:
    """Delete a job's checkpoint or export, by its id or name. Raises NotFound and IllegalTransition."""
    found = find_saved(context, table, job_id, name, tenant)
    with context.database.write() as session:
        commands.delete_saved(session, table, job_id, found.id, context.database.now(session), tenant)


def find_saved(context: AppContext, table: type[Saved], job_id: str, name: str, tenant: str | None) -> Saved:
    """Return a job's checkpoint or export, by its id or name. Raises NotFound."""
    with context.database.read() as session:
        existing_job(session, job_id, tenant)
        row = store.records.find_saved(session, table, job_id, name) if name.isascii() and name.isprintable() else None
        if row is None:
            kind = table.__tablename__.removesuffix("s")
            raise NotFound(f"job {job_id} has no {kind} {name!r}; its list of {kind}s has their ids")
        session.expunge(row)
        return row
