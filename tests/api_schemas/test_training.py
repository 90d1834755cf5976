"""The recipe of a job: presets that a job overrides, and numbers that the named optimizer or schedule would not read."""

from typing import Any

import pytest
from pydantic import ValidationError

from octet.api_schemas import JobSpec, TrainingSpec, explain
from octet.api_schemas.training import TRAINING_PRESETS


@pytest.mark.parametrize("name", TRAINING_PRESETS)
def test_a_preset_is_a_whole_recipe_that_survives_storage(name: str) -> None:
    training = TrainingSpec.model_validate({"preset": name})
    assert TrainingSpec.model_validate(training.model_dump(mode="json")) == training
    assert training.optimizer.weight_decay == TRAINING_PRESETS[name]["optimizer"]["weight_decay"]


def test_a_job_overrides_a_preset_field_by_field() -> None:
    changes = {"steps": 10, "optimizer": {"weight_decay": 0.3}, "schedule": {"name": "linear"}, "gradient_clip": 2.0}
    training = TrainingSpec.model_validate({"preset": "deit", **changes})
    assert (training.steps, training.epochs) == (10, None)
    assert (training.optimizer.weight_decay, training.optimizer.betas) == (0.3, (0.9, 0.999))
    assert (training.schedule.name, training.schedule.warmup_steps) == ("linear", 0)  # the preset's numbers were a cosine's
    assert (training.gradient_clip, training.label_smoothing) == (2.0, 0.1)
    assert TrainingSpec.model_validate({"preset": "deit", "optimizer": {"name": "lion"}}).optimizer.no_decay == ()


@pytest.mark.parametrize(
    ("changes", "field", "allowed"),
    [
        ({"optimizer": {"name": "sgd", "betas": [0.8, 0.9]}}, "training.optimizer.betas", "adamw or adam or lion"),
        ({"optimizer": {"momentum": 0.5}}, "training.optimizer.momentum", "sgd"),
        ({"optimizer": {"name": "sgd"}, "gradient_clip": None}, "training.gradient_clip", "bounds a step"),
        ({"schedule": {"name": "constant", "final_fraction": 0.5}}, "training.schedule.final_fraction", "cosine"),
        ({"schedule": {"power": 2.0}}, "training.schedule.power", "polynomial"),
        ({"schedule": {"decay_fraction": 0.5}}, "training.schedule.decay_fraction", "warmup_stable_decay"),
        (
            {"schedule": {"name": "warmup_stable_decay", "warmup_steps": 150, "decay_fraction": 0.5}},
            "training.schedule.warmup_steps",
            "at most 100",
        ),
        ({"label_smoothing": 0.1}, "training.label_smoothing", "classes of images"),
        ({"ema_decay": 1.0}, "training.ema_decay", "less than 1"),
        ({"preset": "deitt"}, "training.preset", "deit"),
    ],
)
def test_what_would_have_no_effect_is_refused(
    spec_document: dict[str, Any], changes: dict[str, Any], field: str, allowed: str
) -> None:
    spec_document["training"] |= {"steps": 200, **changes}
    with pytest.raises(ValidationError) as raised:
        JobSpec.model_validate(spec_document)
    (problem,) = explain(raised.value, JobSpec)
    assert problem.field == field
    assert allowed in f"{problem.allowed} {problem.message}"


def test_a_moving_average_is_refused_where_no_rank_holds_all_weights(spec_document: dict[str, Any]) -> None:
    spec_document["training"] |= {"ema_decay": 0.9}
    JobSpec.model_validate(spec_document)
    spec_document["parallelism"] = {"zero_stage": 1}
    with pytest.raises(ValidationError) as raised:
        JobSpec.model_validate(spec_document)
    (problem,) = explain(raised.value, JobSpec)
    assert problem.field == "training.ema_decay"
    assert "parallelism.zero_stage" in f"{problem.allowed} {problem.message}"
