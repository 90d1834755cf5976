"""Trackers: programs of others that show a job's curves. A job names them in `trackers`; the operator can add some to each."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from octet.api_schemas.base import Contract, refusal

MAX_TRACKERS = 4


class TensorBoardTracker(Contract):
    """TensorBoard's event files, in `trackers/tensorboard` of the job's folder."""

    kind: Literal["tensorboard"] = "tensorboard"


class MlflowTracker(Contract):
    """A run of MLflow, which later attempts of the job continue."""

    kind: Literal["mlflow"] = "mlflow"
    experiment: str = Field(
        default="octet", pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._/-]{0,99}$", description="created if it does not exist"
    )
    online: bool = Field(
        default=False,
        description="true: the server that MLFLOW_TRACKING_URI names in the ranks' environment, which the operator sets; "
        "false: the SQLite file trackers/mlflow.db of the job's folder",
    )


Tracker = Annotated[TensorBoardTracker | MlflowTracker, Field(discriminator="kind")]
Trackers = Annotated[tuple[Tracker, ...], Field(max_length=MAX_TRACKERS)]


def check_kinds(trackers: Sequence[TensorBoardTracker | MlflowTracker]) -> None:
    """Refuse two trackers of a kind: they would write the same files."""
    kinds = [tracker.kind for tracker in trackers]
    if twice := [kind for kind in kinds if kinds.count(kind) > 1]:
        change = f"Remove all of kind {twice[0]} but one."
        raise refusal("trackers", got=kinds, allowed="one tracker of each kind", change=change)


def with_operators(
    trackers: Sequence[TensorBoardTracker | MlflowTracker], operators: Sequence[TensorBoardTracker | MlflowTracker]
) -> tuple[TensorBoardTracker | MlflowTracker, ...]:
    """Return a job's trackers and the operator's, which take the places of the job's of their kinds."""
    kinds = {tracker.kind for tracker in operators}
    return (*(tracker for tracker in trackers if tracker.kind not in kinds), *operators)
