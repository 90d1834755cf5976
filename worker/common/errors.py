"""Errors that end a rank before its last step; each `RankError` has the reason that is reported.

├── InvalidConfig      the spec cannot run as it stands
├── DataError          the data is missing, unreadable or too short
├── NonFiniteLoss      the loss stayed infinite or NaN
├── Diverged           the loss stayed far above the loss of the first step
├── WrongNode          this node or device is not the pool's
├── StorageFull        the disk, or our quota of it, takes no more
├── CollectiveFailed   a collective failed: another rank is gone, or called another
├── RanksFailed        what the ranks agreed on
├── StoreUnreachable   an object store did not answer, several times
└── Stopped            not a failure: the stop was decided elsewhere
    ├── Cancelled      the user wants the job to end or to pause
    ├── LeaseLost      the control plane did not answer for longer than the lease
    └── Fenced         another attempt has taken over; this one may write nothing more
"""

import errno

from octet.api_schemas import FailureReason

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class RankError(Exception):
    """Base of all errors that end a rank. `reason` is None if there is nothing to report."""

    reason: FailureReason | None = None


class InvalidConfig(RankError):
    reason = FailureReason.INVALID_CONFIG


class DataError(RankError):
    reason = FailureReason.DATA_ERROR


class NonFiniteLoss(RankError):
    reason = FailureReason.NON_FINITE_LOSS


class Diverged(RankError):
    reason = FailureReason.DIVERGED


class LimitsBroken(RankError):
    reason = FailureReason.FP8_LIMITS


class WrongNode(RankError):
    reason = FailureReason.WRONG_NODE


class StorageFull(RankError):
    reason = FailureReason.STORAGE_FULL


class CollectiveFailed(RankError, RuntimeError):
    reason = FailureReason.WORKER_LOST


class RanksFailed(RankError):
    """The same on all ranks of a job: the first cause, with the ranks that raised it and those that followed."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class StoreUnreachable(RankError):
    reason = FailureReason.STORE_UNREACHABLE


class Stopped(RankError):
    """Base of the stops that are not failures. `saves`: the run saves a checkpoint before it ends."""

    saves = False


class Cancelled(Stopped):
    def __init__(self, message: str, *, saves: bool = False) -> None:
        super().__init__(message)
        self.saves = saves


class LeaseLost(Stopped):
    pass


class Fenced(Stopped):
    pass


def reason_of(error: BaseException) -> FailureReason:
    """Return the reason that is reported for an error that ended a rank."""
    import torch

    if isinstance(error, RankError) and error.reason is not None:
        return error.reason
    if is_storage_full(error):
        return FailureReason.STORAGE_FULL
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return FailureReason.OUT_OF_MEMORY
    return FailureReason.WORKER_ERROR


def message_of(error: BaseException) -> str:
    """Describe an error: a rank's own errors explain themselves, others need the name of their class."""
    return str(error) if isinstance(error, RankError) else f"{type(error).__name__}: {error}"


def message_of_rank(error: BaseException, rank: int, num_ranks: int) -> str:
    """Describe an error of one of several ranks, unless they have agreed on it already."""
    is_alone = num_ranks > 1 and not isinstance(error, RanksFailed)
    return f"rank {rank} of {num_ranks}: {message_of(error)}" if is_alone else message_of(error)


def is_storage_full(error: BaseException | None) -> bool:
    """True if the error, or one that it came from, is of a full disk or quota.

    A library in Rust (safetensors) wraps the number of the system's error into its text.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if any(f"os error {number})" in str(error) for number in _FULL):
            return True
        error = error.__cause__ or error.__context__
    return False
