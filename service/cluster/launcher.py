"""The seam between the dispatcher and a cluster. Every call may be repeated, and every call has a deadline of its own.

A launcher holds no truth: what it says of an attempt is advice about processes, never about the job.
"""

from collections.abc import Sequence
from typing import Protocol

from api_schemas import AttemptRef, LaunchOrder, PoolCapacity, Probe


class LauncherError(Exception):
    """The cluster refused or did not answer. `retryable`: the same call may succeed later."""

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


class Launcher(Protocol):
    """Runs attempts. Any method but `probe` may raise LauncherError."""

    def launch(self, order: LaunchOrder) -> None:
        """Start an attempt's processes. Launching what is there already changes nothing."""

    def probe(self, ref: AttemptRef) -> Probe:
        """What became of an attempt's processes; UNREACHABLE where nobody can say."""

    def stop(self, ref: AttemptRef, grace_s: float) -> None:
        """End an attempt's processes, if any. Returns once they are gone and their slots are free."""

    def list(self) -> Sequence[AttemptRef]:
        """Every attempt that has processes."""

    def capacity(self) -> Sequence[PoolCapacity]:
        """What each pool has now."""

    def close(self) -> None:
        """Let go of the cluster; attempts go on."""
