"""States of jobs and attempts, and the reasons of failures. The flags of a state are methods of its enum."""

from enum import StrEnum


class JobState(StrEnum):
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        return self in {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}


class DesiredState(StrEnum):
    """The state that the user wants; kept apart from the observed state. Ranks hear it with each reply."""

    RUN = "run"
    PAUSE = "pause"
    CANCEL = "cancel"
    CANCEL_NOW = "cancel_now"
    YIELD = "yield"  # to save a checkpoint, end, and wait in the queue: the server stops, or a loan of slots ends

    @property
    def saves(self) -> bool:
        """True if ranks save a checkpoint before they end."""
        return self in {DesiredState.PAUSE, DesiredState.CANCEL, DesiredState.YIELD}


class AttemptState(StrEnum):
    RESERVED = "reserved"
    LAUNCHING = "launching"
    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        return self in {AttemptState.SUCCEEDED, AttemptState.FAILED, AttemptState.CANCELLED}


class Blame(StrEnum):
    """The side at fault: the job, whose spec limits its retries, or the platform."""

    JOB = "job"
    PLATFORM = "platform"


class FailureReason(StrEnum):
    """The reason of a failed attempt. `retryable`: the same spec can succeed later. `blame`: the side at fault."""

    INVALID_CONFIG = "invalid_config"
    DATA_ERROR = "data_error"
    OUT_OF_MEMORY = "out_of_memory"
    DOES_NOT_FIT = "does_not_fit"
    NOT_PLANNED = "not_planned"
    NON_FINITE_LOSS = "non_finite_loss"
    DIVERGED = "diverged"
    FP8_LIMITS = "fp8_limits"
    LIMIT_REACHED = "limit_reached"
    WRONG_NODE = "wrong_node"
    STORAGE_FULL = "storage_full"
    STORE_UNREACHABLE = "store_unreachable"
    WORKER_LOST = "worker_lost"
    WORKER_ERROR = "worker_error"
    NODE_LOST = "node_lost"
    STALLED = "stalled"
    LAUNCH_FAILED = "launch_failed"
    START_TIMEOUT = "start_timeout"
    CLUSTER_LOST = "cluster_lost"
    LEASE_EXPIRED = "lease_expired"

    @property
    def retryable(self) -> bool:
        return _TRAITS[self][0]

    @property
    def blame(self) -> Blame:
        return _TRAITS[self][1]

    @property
    def hint(self) -> str:
        return _TRAITS[self][2]

    @property
    def platform_retries(self) -> int | None:
        """The failures of this reason after which a job is tried again, unless its spec says otherwise. None: all of them."""
        return _PLATFORM_RETRIES[self]

    @property
    def calls_for_precision(self) -> bool:
        """True for a failure that another level may not have."""
        return self in {FailureReason.NON_FINITE_LOSS, FailureReason.DIVERGED, FailureReason.FP8_LIMITS}


_TRAITS: dict[FailureReason, tuple[bool, Blame, str]] = {
    FailureReason.INVALID_CONFIG: (False, Blame.JOB, "Change the spec as the message says and submit it again."),
    FailureReason.DATA_ERROR: (False, Blame.JOB, "Check that data.path holds the files that the spec names."),
    FailureReason.OUT_OF_MEMORY: (
        False,
        Blame.JOB,
        "Lower training.micro_batch_size, choose a level that stores less, or use more workers.",
    ),
    FailureReason.DOES_NOT_FIT: (
        False,
        Blame.JOB,
        "Change the job as the message says. To run it all the same, submit it with resources.force: true.",
    ),
    FailureReason.NOT_PLANNED: (
        False,
        Blame.JOB,
        "No level could be chosen for precision.level auto. Retry the job, or name a level.",
    ),
    FailureReason.NON_FINITE_LOSS: (False, Blame.JOB, "Lower the learning rate or lengthen the warm-up."),
    FailureReason.DIVERGED: (
        False,
        Blame.JOB,
        "Lower training.optimizer.learning_rate, lengthen training.schedule.warmup_steps or set training.gradient_clip.",
    ),
    FailureReason.FP8_LIMITS: (
        False,
        Blame.JOB,
        "Name further levels in precision.ladder, or raise precision.demotion.max_layers.",
    ),
    FailureReason.LIMIT_REACHED: (
        False,
        Blame.JOB,
        "Raise the limit (PATCH resources), or set it to null; then retry the job, which goes on from its checkpoint.",
    ),
    FailureReason.WRONG_NODE: (
        True,
        Blame.PLATFORM,
        "A worker found a node or device that is not its pool's: check the pool's labels.",
    ),
    FailureReason.STORAGE_FULL: (
        True,
        Blame.PLATFORM,
        "The disk of the data folder is full. The job resumes from its last checkpoint once the operator has freed space.",
    ),
    FailureReason.STORE_UNREACHABLE: (
        True,
        Blame.PLATFORM,
        "An object store did not answer, asked several times. The job resumes from its last checkpoint once the store is back.",
    ),
    FailureReason.WORKER_LOST: (
        True,
        Blame.JOB,
        "A worker process died. Set retry.max_failures to resume from the last checkpoint.",
    ),
    FailureReason.WORKER_ERROR: (True, Blame.JOB, "A worker raised an error; its traceback is in the logs."),
    FailureReason.NODE_LOST: (
        True,
        Blame.PLATFORM,
        "A node of the job is gone. The job resumes from its last checkpoint on others; see that the pool has enough.",
    ),
    FailureReason.STALLED: (True, Blame.JOB, "No step was finished for too long; look at the logs of all ranks."),
    FailureReason.LAUNCH_FAILED: (True, Blame.PLATFORM, "The cluster refused the attempt; the event has its message."),
    FailureReason.START_TIMEOUT: (True, Blame.PLATFORM, "The workers did not come up in time; check the pool's nodes."),
    FailureReason.CLUSTER_LOST: (True, Blame.PLATFORM, "The Ray cluster that ran the attempt is gone."),
    FailureReason.LEASE_EXPIRED: (
        True,
        Blame.PLATFORM,
        "The attempt could not reach the control plane for longer than its lease.",
    ),
}

_PLATFORM_RETRIES: dict[FailureReason, int | None] = {
    FailureReason.WRONG_NODE: 3,  # labels that an operator has to correct
    FailureReason.STORAGE_FULL: None,  # the job waits for space, however long it takes
    FailureReason.STORE_UNREACHABLE: 20,
    FailureReason.NODE_LOST: 10,
    FailureReason.LAUNCH_FAILED: 10,
    FailureReason.START_TIMEOUT: 5,  # each takes minutes, and slots
    FailureReason.CLUSTER_LOST: 10,
    FailureReason.LEASE_EXPIRED: 10,
}
