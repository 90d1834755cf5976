"""Trackers: programs of others that show a job's curves. A job names them in `trackers`; the operator can add some to each."""

from typing import Self

from pydantic import Field

from octet.api_schemas.base import Contract


class TensorBoardTracker(Contract):
    """TensorBoard's event files, in `trackers/tensorboard` of the job's folder."""


class MlflowTracker(Contract):
    """A run of MLflow, which later attempts of the job continue."""

    experiment: str = Field(
        default="octet", pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._/-]{0,99}$", description="created if it does not exist"
    )
    online: bool = Field(
        default=False,
        description="true: the server that MLFLOW_TRACKING_URI names in the ranks' environment, which the operator sets; "
        "false: the SQLite file trackers/mlflow.db of the job's folder",
    )


class WandbTracker(Contract):
    """A run of Weights & Biases, whose id is the job's."""

    project: str = Field(default="octet", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    online: bool = Field(
        default=False,
        description="true: the server and key of WANDB_* variables in the ranks' environment, which the operator sets; "
        "false: folders in trackers/wandb of the job's folder, for `wandb sync`",
    )


class TrackersSpec(Contract):
    """The trackers of a job by their kinds; null for none."""

    tensorboard: TensorBoardTracker | None = None
    mlflow: MlflowTracker | None = None
    wandb: WandbTracker | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that are set."""
        return tuple(kind for kind in type(self).model_fields if getattr(self, kind) is not None)

    def with_operators(self, operators: Self) -> Self:
        """Return these trackers and the operator's, which take the places of those of their kinds."""
        return self.model_copy(update={kind: getattr(operators, kind) for kind in operators.kinds})
