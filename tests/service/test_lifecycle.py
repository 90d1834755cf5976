"""The two tables of transitions, cell by cell."""

import itertools

import pytest

from octet.api_schemas import AttemptState, JobState
from octet.service.errors import IllegalTransition
from octet.service.jobs.lifecycle import (
    ATTEMPT_TRANSITIONS,
    JOB_TRANSITIONS,
    AttemptEvent,
    JobEvent,
    next_attempt_state,
    next_job_state,
)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(JobState, JobEvent)))
def test_every_job_transition_is_in_the_table_or_refused(state: JobState, event: JobEvent) -> None:
    if (state, event) in JOB_TRANSITIONS:
        assert next_job_state(state, event) is JOB_TRANSITIONS[state, event]
        assert not state.is_terminal or event in {JobEvent.RETRY, JobEvent.EXTEND, JobEvent.EXPORT}
    else:
        with pytest.raises(IllegalTransition, match=state.value):
            next_job_state(state, event)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(AttemptState, AttemptEvent)))
def test_every_attempt_transition_is_in_the_table_or_refused(state: AttemptState, event: AttemptEvent) -> None:
    if (state, event) in ATTEMPT_TRANSITIONS:
        assert next_attempt_state(state, event) is ATTEMPT_TRANSITIONS[state, event]
        assert not state.is_terminal
    else:
        with pytest.raises(IllegalTransition, match=state.value):
            next_attempt_state(state, event)


def test_every_live_state_leads_to_an_end_and_every_state_can_be_reached() -> None:
    for table, start in ((JOB_TRANSITIONS, JobState.QUEUED), (ATTEMPT_TRANSITIONS, AttemptState.RESERVED)):
        states = type(start)
        assert reachable(table, start) == set(states)
        for state in states:
            assert any(reached.is_terminal for reached in reachable(table, state))


def reachable(table: dict, start: JobState | AttemptState) -> set[JobState | AttemptState]:
    found = {start}
    while more := {after for (before, _), after in table.items() if before in found} - found:
        found |= more
    return found


def test_a_cancelled_job_is_tried_again_only_if_somebody_asks() -> None:
    assert (JobState.CANCELLING, JobEvent.REQUEUE) not in JOB_TRANSITIONS
