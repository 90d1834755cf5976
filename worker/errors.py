"""Reasons why a rank stops before its last step; each error carries the reason that the control plane is told.

RankError
├── InvalidConfig      the spec cannot run as it stands
├── DataError          the data is missing, unreadable or too short
├── NonFiniteLoss      the loss stayed infinite or NaN
├── Diverged           the loss stayed far above the loss of the first step
├── WrongNode          this node or device is not the pool's
└── Stopped            not a failure: the stop was decided elsewhere
    ├── Cancelled      the user wants the job to end
    ├── LeaseLost      the control plane did not answer for longer than the lease
    └── Fenced         another attempt has taken over; this one may write nothing more
"""

from api_schemas import FailureReason


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


class WrongNode(RankError):
    reason = FailureReason.WRONG_NODE


class Stopped(RankError):
    """Base of the stops that are not failures."""


class Cancelled(Stopped):
    pass


class LeaseLost(Stopped):
    pass


class Fenced(Stopped):
    pass
