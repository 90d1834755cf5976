"""Trackers of a job and of the operator: the operator's come first, and no key of a tracker is part of a job."""

from typing import Any

import pytest
from pydantic import ValidationError

from octet.api_schemas import JobSpec, explain
from octet.api_schemas.tracking import MlflowTracker, TensorBoardTracker, TrackersSpec, WandbTracker


def test_an_operators_tracker_takes_the_place_of_a_jobs() -> None:
    own = TrackersSpec(tensorboard=TensorBoardTracker(), mlflow=MlflowTracker(experiment="mine"))
    operators = TrackersSpec(mlflow=MlflowTracker(online=True), wandb=WandbTracker())
    both = own.with_operators(operators)
    assert both.kinds == ("tensorboard", "mlflow", "wandb")
    assert both.mlflow == MlflowTracker(online=True)
    assert own.with_operators(TrackersSpec()) == own


@pytest.mark.parametrize(
    ("trackers", "field", "words"),
    [
        ({"tensorbord": {}}, "trackers.tensorbord", "Did you mean 'tensorboard'?"),
        ({"tensorboard": {"online": True}}, "trackers.tensorboard.online", "unknown field 'online'"),
        ({"wandb": {"api_key": "secret"}}, "trackers.wandb.api_key", "unknown field 'api_key'"),
        ({"mlflow": {"experiment": ""}}, "trackers.mlflow.experiment", "Change trackers.mlflow.experiment."),
    ],
)
def test_trackers_that_cannot_be(spec_document: dict[str, Any], trackers: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate(spec_document | {"trackers": trackers})
    (violation,) = explain(caught.value, JobSpec)
    assert violation.field == field
    assert words in violation.message
