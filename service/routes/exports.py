"""The exports of a job: their list, the files of each, one by one or as an archive, and how one is deleted."""

from typing import Annotated

from fastapi import APIRouter, Path, Query
from fastapi.responses import FileResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from octet.api_schemas import CheckpointFile, Export, Page
from octet.service import store
from octet.service.db.tables import ExportRow
from octet.service.deps import AppContextDep, JobIdDep, VisibleTenantDep
from octet.service.errors import NotFound
from octet.service.http.pages import LimitQuery, page_of
from octet.service.http.problems import Answers, answers
from octet.service.http.streams import while_the_key_works
from octet.service.jobs import checkpoint_files, views
from octet.service.routes.files import OpenFile, delete_saved, find_saved
from octet.service.routes.job_views import existing_job

router = APIRouter(prefix="/v1/jobs/{job_id}/exports", tags=["records"])

ExportName = Annotated[str, Path(max_length=64, description="the export's id, or its name")]
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_FILE: Answers = {200: {"content": {"application/octet-stream": _BINARY}}}
_ARCHIVE: Answers = {200: {"content": {"application/x-tar": _BINARY}}}


@router.get("", operation_id="list_exports", responses=answers(404, 422))
def list_exports(
    job_id: JobIdDep,
    context: AppContextDep,
    tenant: VisibleTenantDep,
    limit: LimitQuery = 100,
    after: Annotated[str | None, Query(max_length=64, description="last_id of the page before")] = None,
) -> Page[Export]:
    """Complete exports, in the order of their steps, each with its mismatch card."""
    with context.database.read() as session:
        existing_job(session, job_id, tenant)
        found = [views.record(Export, row) for row in store.records.exports_of(session, job_id)]
    if after is not None:
        ids = [export.id for export in found]
        if after not in ids:
            raise NotFound(f"job {job_id} has no export {after!r}; its list of exports has their ids")
        found = found[ids.index(after) + 1 :]
    return page_of(found, limit, lambda export: export.id)


@router.get("/{name}/files", operation_id="list_export_files", responses=answers(404, 422))
def list_files(job_id: JobIdDep, name: ExportName, context: AppContextDep, tenant: VisibleTenantDep) -> Page[CheckpointFile]:
    """All files of an export, each with its SHA-256. 404 where the server cannot read them."""
    files = checkpoint_files.files_of(context.settings, find_saved(context, ExportRow, job_id, name, tenant))
    return page_of(files, len(files), lambda file: file.path)


@router.get(
    "/{name}/files/{path:path}",
    operation_id="get_export_file",
    response_class=FileResponse,
    responses=answers(404, 422) | _FILE,
)
def get_file(
    job_id: JobIdDep,
    name: ExportName,
    path: Annotated[str, Path(max_length=1024)],
    context: AppContextDep,
    tenant: VisibleTenantDep,
) -> FileResponse:
    """The content of a file that the list has."""
    return OpenFile(checkpoint_files.open_listed(context.settings, find_saved(context, ExportRow, job_id, name, tenant), path))


@router.get(
    "/{name}/archive",
    operation_id="get_export_archive",
    response_class=StreamingResponse,
    responses=answers(404, 422) | _ARCHIVE,
)
def get_archive(job_id: JobIdDep, name: ExportName, context: AppContextDep, tenant: VisibleTenantDep) -> StreamingResponse:
    """All files of an export as one tar archive, which is made while it is sent."""
    row = find_saved(context, ExportRow, job_id, name, tenant)
    archive = checkpoint_files.archive_of(context.settings, row)
    headers = {"Content-Length": str(archive.num_bytes), "Content-Disposition": f'attachment; filename="{row.name}.tar"'}
    return _SentArchive(archive.content, media_type="application/x-tar", headers=headers)


class _SentArchive(StreamingResponse):
    """Breaks off once the key of the request ends, and so it does not pass for whole."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_the_key_works(scope, super().__call__(scope, receive, send))


@router.delete("/{name}", status_code=204, operation_id="delete_export", responses=answers(404, 409, 422))
def delete(job_id: JobIdDep, name: ExportName, context: AppContextDep, tenant: VisibleTenantDep) -> None:
    """Delete an export of a job that is over. Its files go within a minute."""
    delete_saved(context, ExportRow, job_id, name, tenant)
