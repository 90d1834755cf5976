"""The legal transitions of jobs and attempts. Pure: two tables decide, and nothing else does.

job      queued ──place──▶ starting ──start──▶ running ──succeed──▶ succeeded
           ▲  └─cancel─▶ cancelled, ─fail─▶ failed (no device can hold it)
           │                          │           │
           ├──────────────requeue─────┴───────────┤ fail ─▶ failed,  cancel ─▶ cancelling ─▶ cancelled
           ├──resume── paused ◀─stop── pausing ◀──┘ pause;  a queued job is paused at once
           ├──retry── failed, cancelled;  with more steps also succeeded
           └──export── succeeded, which it is again however that ends (keep)

attempt  reserved ─claim─▶ launching ─launched─▶ starting ─started─▶ running ─▶ succeeded | failed | cancelled
"""

from enum import StrEnum

from octet.api_schemas import AttemptState, JobState
from octet.service.errors import IllegalTransition


class JobEvent(StrEnum):
    PLACE = "place"
    START = "start"
    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"
    RETRY = "retry"
    EXTEND = "retry with more steps"
    EXPORT = "export"
    SUCCEED = "succeed"
    REQUEUE = "requeue"  # its attempt failed or yielded, and another follows
    FAIL = "fail"
    STOP = "stop"  # the attempt of a job that is being paused or cancelled has ended
    KEEP = "keep"  # an export that was asked for later does not come; the training had succeeded


class AttemptEvent(StrEnum):
    CLAIM = "claim"
    LAUNCHED = "launched"  # the launch returned, or a rank reported before that
    STARTED = "started"
    SUCCEED = "succeed"
    FAIL = "fail"
    CANCEL = "cancel"
    YIELD = "yield"  # an elastic job grows: its next attempt has more ranks


_J, _E = JobState, JobEvent
JOB_TRANSITIONS: dict[tuple[JobState, JobEvent], JobState] = {
    (_J.QUEUED, _E.PLACE): _J.STARTING,
    (_J.QUEUED, _E.PAUSE): _J.PAUSED,
    (_J.QUEUED, _E.CANCEL): _J.CANCELLED,
    (_J.QUEUED, _E.FAIL): _J.FAILED,
    (_J.STARTING, _E.START): _J.RUNNING,
    (_J.STARTING, _E.PAUSE): _J.PAUSING,
    (_J.STARTING, _E.CANCEL): _J.CANCELLING,
    (_J.STARTING, _E.REQUEUE): _J.QUEUED,
    (_J.STARTING, _E.FAIL): _J.FAILED,
    (_J.RUNNING, _E.PAUSE): _J.PAUSING,
    (_J.RUNNING, _E.CANCEL): _J.CANCELLING,
    (_J.RUNNING, _E.SUCCEED): _J.SUCCEEDED,
    (_J.RUNNING, _E.REQUEUE): _J.QUEUED,
    (_J.RUNNING, _E.FAIL): _J.FAILED,
    # While it is being paused a job may still begin or end on its own; after a failure it waits as a paused job.
    (_J.PAUSING, _E.START): _J.PAUSING,
    (_J.PAUSING, _E.CANCEL): _J.CANCELLING,
    (_J.PAUSING, _E.SUCCEED): _J.SUCCEEDED,
    (_J.PAUSING, _E.REQUEUE): _J.PAUSED,
    (_J.PAUSING, _E.FAIL): _J.FAILED,
    (_J.PAUSING, _E.STOP): _J.PAUSED,
    (_J.PAUSED, _E.RESUME): _J.QUEUED,
    (_J.PAUSED, _E.CANCEL): _J.CANCELLED,
    # While it is being cancelled a job may still begin or end on its own; it is never tried again.
    (_J.CANCELLING, _E.START): _J.CANCELLING,
    (_J.CANCELLING, _E.CANCEL): _J.CANCELLING,
    (_J.CANCELLING, _E.SUCCEED): _J.SUCCEEDED,
    (_J.CANCELLING, _E.FAIL): _J.CANCELLED,
    (_J.CANCELLING, _E.STOP): _J.CANCELLED,
    # A job that is over goes on only if somebody asks for it.
    (_J.FAILED, _E.RETRY): _J.QUEUED,
    (_J.CANCELLED, _E.RETRY): _J.QUEUED,
    **{(state, _E.EXTEND): _J.QUEUED for state in JobState if state.is_terminal},
    (_J.SUCCEEDED, _E.EXPORT): _J.QUEUED,
    **{(state, _E.KEEP): _J.SUCCEEDED for state in JobState if not state.is_terminal},
}

_COMMANDS = (_E.PAUSE, _E.RESUME, _E.CANCEL, _E.RETRY, _E.EXTEND, _E.EXPORT)

_A, _V = AttemptState, AttemptEvent
ATTEMPT_TRANSITIONS: dict[tuple[AttemptState, AttemptEvent], AttemptState] = {
    (_A.RESERVED, _V.CLAIM): _A.LAUNCHING,
    (_A.LAUNCHING, _V.CLAIM): _A.LAUNCHING,
    (_A.LAUNCHING, _V.LAUNCHED): _A.STARTING,
    # A fast worker is heard before the call that launched it returns.
    (_A.STARTING, _V.LAUNCHED): _A.STARTING,
    (_A.RUNNING, _V.LAUNCHED): _A.RUNNING,
    (_A.STARTING, _V.STARTED): _A.RUNNING,
    (_A.RUNNING, _V.SUCCEED): _A.SUCCEEDED,
    (_A.RUNNING, _V.YIELD): _A.CANCELLED,
    **{(state, _V.FAIL): _A.FAILED for state in AttemptState if not state.is_terminal},
    **{(state, _V.CANCEL): _A.CANCELLED for state in AttemptState if not state.is_terminal},
}


def next_job_state(state: JobState, event: JobEvent) -> JobState:
    """Raises IllegalTransition, which lists what a user can do, where the table has no such row."""
    if (state, event) not in JOB_TRANSITIONS:
        possible = [known.value for known in _COMMANDS if (state, known) in JOB_TRANSITIONS]
        raise IllegalTransition(f"the job is {state.value}; {event.value} is not possible. Possible: {', '.join(possible)}.")
    return JOB_TRANSITIONS[state, event]


def next_attempt_state(state: AttemptState, event: AttemptEvent) -> AttemptState:
    """Raises IllegalTransition where the table has no such row."""
    if (state, event) not in ATTEMPT_TRANSITIONS:
        raise IllegalTransition(f"the attempt is {state.value}; {event.value} is not possible.")
    return ATTEMPT_TRANSITIONS[state, event]
