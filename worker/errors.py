"""Why a rank stops before its last step, each with the reason that the control plane is told.

RankError
├── InvalidConfig      the spec cannot run as it stands
├── DataError          the data is missing, unreadable or too short
├── NonFiniteLoss      the loss stayed infinite or NaN
├── Diverged           the loss stayed far above that of the first step
├── WrongNode          this node or device is not the pool's
└── Stopped            not a failure: somebody else decided
    ├── Cancelled      the user wants the job to end
    ├── LeaseLost      the control plane was not heard for longer than the lease
    └── Fenced         another attempt has taken over; nothing more may be written
"""

from api_schemas import FailureReason


class RankError(Exception):
    """Base of all; `reason` is None where there is nothing to report."""

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
    """Base of the stops that are no failure."""


class Cancelled(Stopped):
    pass


class LeaseLost(Stopped):
    pass


class Fenced(Stopped):
    pass
