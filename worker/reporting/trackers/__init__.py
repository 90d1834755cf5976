"""Trackers of other projects, fed by what rank 0 reports. Importing this loads none of their packages."""

from importlib.util import find_spec

from octet.api_schemas.tracking import MlflowTracker, TensorBoardTracker, Trackers
from octet.worker.common.errors import InvalidConfig
from octet.worker.reporting.trackers.feed import Tracker
from octet.worker.reporting.trackers.mlflow import MlflowRun
from octet.worker.reporting.trackers.tensorboard import TensorBoardFiles

_MODULES = {"tensorboard": ("tensorboard",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""The modules that each kind needs, beyond those of a worker."""


def check_packages(trackers: Trackers) -> None:
    """Raise InvalidConfig if this environment lacks the package of a tracker."""
    for tracker in trackers:
        if missing := [module for module in _MODULES[tracker.kind] if find_spec(module) is None]:
            raise InvalidConfig(
                f"trackers: got kind {tracker.kind}, and the environment of the ranks has no {missing[0]}; allowed: kinds "
                f"that are installed there. Install octet[{tracker.kind}] for the ranks, or remove the tracker"
            )


def make_trackers(trackers: Trackers) -> dict[str, Tracker]:
    """Return what writes to each tracker, by its kind. Nothing is opened yet."""
    return {tracker.kind: _make(tracker) for tracker in trackers}


def _make(tracker: TensorBoardTracker | MlflowTracker) -> Tracker:
    match tracker:
        case TensorBoardTracker():
            return TensorBoardFiles()
        case MlflowTracker():
            return MlflowRun(tracker.experiment, tracker.online)
