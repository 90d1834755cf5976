"""Decides if a job whose attempt failed is tried again. Pure: the counts of its failures in, a verdict out.

Each reason has a budget. Faults of the platform have one each (`FailureReason.platform_retries`) and use up none of the job's.
Faults of the job share `retry.max_failures`. `retry.by_reason` gives any reason a budget of its own.
A job that fails in the same step for the same reason again and again is in a crash loop, and ends before its budget does.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from octet.api_schemas import Blame, FailureReason
from octet.api_schemas.job import RetrySpec

CRASH_LOOP = 3
"""Failures in one step, one after the other and for one reason, after which another would be the same."""
LONGEST_BACKOFF_S = 60.0
_ENDED_FROM_OUTSIDE = {FailureReason.WORKER_LOST, FailureReason.STALLED}

Counts = Mapping[FailureReason, int]


class FailedAttempt(NamedTuple):
    """A failed attempt. Its steps are None if it did not start to train, or finished no step."""

    reason: FailureReason | None
    resumed_from_step: int | None
    last_step: int | None

    @property
    def failed_in_step(self) -> int | None:
        """The step in which it failed. None before it trained, and if it was ended from outside before its first step ended.

        A process may be killed at any time, so that this says nothing about the step.
        """
        if self.resumed_from_step is None or (self.last_step is None and self.reason in _ENDED_FROM_OUTSIDE):
            return None
        return (self.resumed_from_step if self.last_step is None else self.last_step) + 1


class Verdict(NamedTuple):
    """The decision about a failed job. wait_s: the back-off before it is tried again, or None if it ends. why: why it ends."""

    wait_s: float | None
    why: str = ""


def counts_of(stored: Mapping[str, int] | None) -> dict[FailureReason, int]:
    """Read the failures of a job as they are stored, by reason. None: it has not failed yet."""
    return {FailureReason(reason): count for reason, count in (stored or {}).items()}


def budget_of(reason: FailureReason, retry: RetrySpec) -> int | None:
    """Return how many failures of a reason are tried again. None: all of them."""
    if reason in retry.by_reason:
        return retry.by_reason[reason]
    if not reason.retryable:
        return 0
    return retry.max_failures if reason.blame is Blame.JOB else reason.platform_retries


def used_of(reason: FailureReason, retry: RetrySpec, counts: Counts) -> int:
    """Return how much of a reason's budget is used: the failures of all reasons that share it."""
    if reason in retry.by_reason or reason.blame is Blame.PLATFORM:
        return counts.get(reason, 0)
    return sum(count for each, count in counts.items() if each.blame is Blame.JOB and each not in retry.by_reason)


def judge(retry: RetrySpec, counts: Counts, latest: Sequence[FailedAttempt], draw: float) -> Verdict:
    """Decide about a job whose attempt has just failed.

    counts: failures since the job was last submitted or retried, with this one. latest: the newest failed attempts that are the
    job's fault, or only this one, newest first. draw: from 0 to 1, by which jobs that failed together come back one by one.
    """
    reason = latest[0].reason
    assert reason is not None, "a failure has a reason"
    if not reason.retryable:
        return Verdict(None)
    budget, used = budget_of(reason, retry), used_of(reason, retry, counts)
    if budget is not None and used > budget:
        return Verdict(
            None, f"it is failure {used} of {_BUDGETS[reason.blame]}, and {budget} are tried again" if budget else ""
        )
    step = latest[0].failed_in_step
    if reason.blame is Blame.JOB and counts[reason] >= CRASH_LOOP and step is not None and _repeats(latest):
        return Verdict(
            None,
            f"it is in a crash loop: it has failed in step {step} {CRASH_LOOP} times in a row with {reason.value}, so it is "
            "not tried again. Remove the cause, then retry the job",
        )
    longest_s = min(LONGEST_BACKOFF_S, 2.0 ** min(sum(counts.values()) - 1, 10))
    return Verdict(longest_s * (1 + draw) / 2)


_BUDGETS = {Blame.JOB: "its own", Blame.PLATFORM: "the platform for this reason"}


def _repeats(latest: Sequence[FailedAttempt]) -> bool:
    """Return True if the newest failed attempts are enough for a crash loop, and failed alike."""
    newest = latest[:CRASH_LOOP]
    return len(newest) == CRASH_LOOP and len({(each.reason, each.failed_in_step) for each in newest}) == 1
