"""The seam between the dispatcher and a cluster. Every call may be repeated, and every call has a deadline.

The database decides what is true about a job. A launcher only says what the cluster knows about an attempt's processes.
"""

from collections.abc import Sequence
from typing import Protocol

from octet.api_schemas import AttemptRef, LaunchOrder, PoolCapacity, Probe


class LauncherError(Exception):
    """The cluster refused or did not answer. `retryable`: the same call may succeed later."""

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


class Launcher(Protocol):
    """Runs attempts. Every method except `probe` and `close` may raise LauncherError."""

    def launch(self, order: LaunchOrder) -> None:
        """Start an attempt's processes. A second launch of the same attempt changes nothing."""

    def probe(self, ref: AttemptRef) -> Probe:
        """Say what became of an attempt's processes; UNREACHABLE if the cluster does not answer."""

    def stop(self, ref: AttemptRef, grace_s: float) -> None:
        """End an attempt's processes, if any. Returns once they are gone and their slots are free."""

    def list(self) -> Sequence[AttemptRef]:
        """List every attempt that has processes."""

    def capacity(self) -> Sequence[PoolCapacity]:
        """Count the slots that each pool has now."""

    def close(self) -> None:
        """Disconnect from the cluster. Attempts go on."""
