"""Lists of jobs in compact rows."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field
from sqlalchemy.orm import Session

from octet.api_schemas import Contract, JobState, Violation
from octet.api_schemas.rows import RowOrder, RowPage
from octet.service import store
from octet.service.deps import AppContext, context_of, principal_of
from octet.service.errors import InvalidRequest
from octet.service.http.pages import compressed_json, joined_page
from octet.service.http.problems import answers
from octet.service.jobs.rows import row_json
from octet.service.store.rows import RowFilter

router = APIRouter(prefix="/v1", tags=["jobs"])

_TEXT = r"^[^\x00-\x1f\x7f]*$"
_JOB_ID = r"^job_[0-7][0-9a-hjkmnp-tv-z]{25}$"
_Label = Annotated[str, Field(max_length=321, pattern=r"^[^:\x00-\x1f\x7f]+:[^\x00-\x1f\x7f]*$")]
JobIdText = Annotated[str, Field(pattern=_JOB_ID)]


class RowsQuery(Contract):
    """The parameters of a list: which jobs, in which order, and which part of them."""

    limit: int = Field(default=50, ge=1, le=100)
    offset: int = Field(default=0, ge=0, le=10_000_000, description="skip so many; a page may begin anywhere")
    after: JobIdText | None = Field(default=None, description="begin behind this job, in the same order")
    sort: RowOrder = Field(default="-created", description="newest first, oldest first, by name, or the best evaluation first")
    q: str | None = Field(default=None, min_length=1, max_length=100, pattern=_TEXT, description="a part of the name")
    state: tuple[JobState, ...] = Field(default=(), max_length=16, description="repeat it for several")
    level: str | None = Field(default=None, max_length=32, pattern=_TEXT)
    pool: str | None = Field(default=None, max_length=32, pattern=_TEXT)
    tenant: str | None = Field(default=None, max_length=32, pattern=_TEXT, description="a key with a name sees its own only")
    label: tuple[_Label, ...] = Field(default=(), max_length=16, description="key:value; repeated, all must match")
    id: tuple[JobIdText, ...] = Field(default=(), max_length=100, description="only these jobs")

    def filter_for(self, tenant: str | None) -> RowFilter:
        """Return the filter for a caller who sees the jobs of one tenant, or of all (None). Raises InvalidRequest."""
        if tenant is not None and self.tenant not in (None, tenant):
            message = "Leave it out, or use a key of that tenant."
            raise InvalidRequest.of((Violation(field="tenant", got=self.tenant, allowed=tenant, message=message),))
        labels = tuple((key, value) for key, _, value in (text.partition(":") for text in self.label))
        return RowFilter(self.id, self.state, self.pool, self.level, tenant or self.tenant, self.q, labels)


@router.get("/rows", response_model=RowPage, operation_id="list_rows", responses=answers(422))
def list_rows(request: Request, query: Annotated[RowsQuery, Query()]) -> Response:
    """Jobs as compact rows, and how many there are: what a page or a terminal shows of many jobs.

    Without `level`, `tenant`, `label` and `q` it takes the same time for any number of jobs; these read an index of them.
    """
    context, wanted = context_of(request), query.filter_for(principal_of(request).visible_tenant)
    with context.database.read() as session:
        rows, total = read_rows(session, context, query, wanted)
    has_more = len(rows) > query.limit
    return compressed_json(request, joined_page(rows[: query.limit], has_more=has_more, total=total))


def read_rows(session: Session, context: AppContext, query: RowsQuery, wanted: RowFilter) -> tuple[list[tuple[str, str]], int]:
    """Read a part of a list, each job as its id and JSON, with one more job than asked for if one follows; and the total."""
    rows = store.rows.list_rows(session, wanted, query.sort, query.limit + 1, query.offset, query.after)
    places = context.places.read(session, [row for row in rows if row.state is JobState.QUEUED])
    drawn = context.sparklines.read(session, rows)
    total = context.row_totals.read(session, wanted)
    return [(row.id, row_json(row, places.get(row.id), drawn[row.id])) for row in rows], total
