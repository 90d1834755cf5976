"""Trackers of other projects, fed by what rank 0 reports. Importing this loads none of their packages."""

from importlib.util import find_spec

from octet.api_schemas.tracking import TrackersSpec
from octet.worker.common.errors import InvalidConfig
from octet.worker.reporting.trackers.feed import Tracker
from octet.worker.reporting.trackers.mlflow import MlflowRun
from octet.worker.reporting.trackers.tensorboard import TensorBoardFiles
from octet.worker.reporting.trackers.wandb import WandbRun

_MODULES = {"tensorboard": ("tensorboard",), "mlflow": ("mlflow", "sqlalchemy", "alembic"), "wandb": ("wandb",)}
"""The modules that each kind needs, beyond those of a worker."""


def check_packages(trackers: TrackersSpec) -> None:
    """Raise InvalidConfig if this environment lacks the package of a tracker."""
    for kind in trackers.kinds:
        if missing := [module for module in _MODULES[kind] if find_spec(module) is None]:
            raise InvalidConfig(
                f"trackers.{kind}: the environment of the ranks has no {missing[0]}; allowed: trackers that are installed "
                f"there. Install octet-fp8[{kind}] for the ranks, or remove the tracker"
            )


def make_trackers(trackers: TrackersSpec) -> dict[str, Tracker]:
    """Return what writes to each tracker, by its kind. Nothing is opened yet."""
    made: dict[str, Tracker] = {}
    if trackers.tensorboard is not None:
        made["tensorboard"] = TensorBoardFiles()
    if trackers.mlflow is not None:
        made["mlflow"] = MlflowRun(trackers.mlflow.experiment, trackers.mlflow.online)
    if trackers.wandb is not None:
        made["wandb"] = WandbRun(trackers.wandb.project, trackers.wandb.online)
    return made
