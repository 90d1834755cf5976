"""Rules of a job spec: the documented example is valid, and every broken cross-field rule is refused with a clear message."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from octet.api_schemas import PRESETS, JobSpec, Violation, explain

EXAMPLE: dict[str, Any] = {
    "name": "gpt-on-source-code",
    "model": {"family": "gpt", "preset": "gpt-tiny"},
    "precision": {"level": "O2"},
    "data": {"source": "text", "path": "/data/corpus"},
    "training": {
        "steps": 200,
        "global_batch_size": 16,
        "micro_batch_size": 16,
        "sequence_length": 256,
        "optimizer": {"name": "adamw", "learning_rate": 3.0e-4, "weight_decay": 0.1, "betas": [0.9, 0.95]},
        "schedule": {"name": "cosine", "warmup_steps": 20},
        "gradient_clip": 1.0,
        "eval_every": 50,
        "checkpoint_every": 50,
        "seed": 0,
    },
    "parallelism": {"zero_stage": 0, "tensor": 1, "pipeline": 1, "sequence": False},
    "resources": {"pool": "cpu", "workers": 1},
    "priority": 50,
    "retry": {"max_failures": 3},
    "labels": {"team": "research"},
}


def refused(change: Callable[[dict[str, Any]], object]) -> Violation:
    document = copy.deepcopy(EXAMPLE)
    change(document)
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate(document)
    violations = explain(caught.value, JobSpec)
    assert len(violations) == 1, violations
    return violations[0]


def test_the_documented_example_is_a_job() -> None:
    spec = JobSpec.model_validate(EXAMPLE)
    assert spec.model.sizes == PRESETS["gpt-tiny"]
    assert spec.model_dump(mode="json")["training"]["optimizer"]["betas"] == [0.9, 0.95]


def test_it_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        JobSpec.model_validate(EXAMPLE).priority = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "field", "got", "says"),
    [
        (lambda d: d["precision"].update(level="O9"), "precision.level", "O9", "O2"),
        (lambda d: d["precision"].update(level="02"), "precision.level", "02", "with the letter O"),
        (lambda d: d["precision"].update(level=2), "precision.level", "2", "letter O"),
        (lambda d: d["precision"].update(level="o2"), "precision.level", "o2", "Did you mean 'O2'"),
        (lambda d: d["model"].update(num_heads=7), "model.num_heads", "7", "1, 2, 4, 8, 16, 32, 64, 128"),
        (lambda d: d.update(model={"num_layers": 2}), "model.hidden_size", "null", "model.preset"),
        (lambda d: d["model"].update(preset="gpt-tinny"), "model.preset", "gpt-tinny", "Did you mean 'gpt-tiny'"),
        (lambda d: d["model"].update(vocab_size=100), "model.vocab_size", "100", "256"),
        (lambda d: d["training"].update(stpes=3), "training.stpes", "3", "Did you mean 'steps'"),
        (lambda d: d.update(trainning={}), "trainning", "{}", "Did you mean 'training'"),
        (lambda d: d["training"].update(steps=0), "training.steps", "0", "greater than or equal to 1"),
        (lambda d: d["training"].update(epochs=2), "training.steps", "steps 200 and epochs 2", "one of"),
        (lambda d: d["training"].pop("steps"), "training.steps", "null", "training.epochs"),
        (lambda d: d["training"].update(sequence_length=512), "training.sequence_length", "512", "256"),
        (lambda d: d["training"].update(micro_batch_size=5), "training.micro_batch_size", "5", "16"),
        (lambda d: d["resources"].update(workers=3), "training.global_batch_size", "16", "multiple of"),
        (lambda d: d["training"]["schedule"].update(warmup_steps=200), "training.schedule.warmup_steps", "200", "200"),
        (
            lambda d: d["training"]["optimizer"].update(name="lion", eps=1e-6),
            "training.optimizer.eps",
            "1e-06 with the optimizer lion",
            "Remove training.optimizer.eps",
        ),
        (lambda d: d["training"]["optimizer"].update(name="adagrad"), "training.optimizer.name", "adagrad", "sgd"),
        (lambda d: d["training"]["optimizer"].update(betas=[0.9, 1.0]), "training.optimizer.betas.1", "1.0", "less"),
        (
            lambda d: d["training"]["optimizer"].update(learning_rate=float("nan")),
            "training.optimizer.learning_rate",
            "NaN",
            "finite",
        ),
        (lambda d: d["data"].update(path="corpus"), "data.path", "corpus", "absolute"),
        (lambda d: d["data"].update(path="/a\0b"), "data.path", "/a\0b", "zero byte"),
        (lambda d: d["data"].update(include=["../*"]), "data.include.0", "../*", "relative"),
        (lambda d: d.pop("data"), "data", "nothing", "required"),
        (lambda d: d.update(name="../../etc"), "name", "../../etc", "pattern"),
        (lambda d: d["resources"].update(pool="CPU; rm"), "resources.pool", "CPU; rm", "pattern"),
        (lambda d: d["parallelism"].update(tensor=3), "parallelism.tensor", "3", "1, 2, 4"),
        (lambda d: d["parallelism"].update(pipeline=0), "parallelism.pipeline", "0", "1"),
    ],
)
def test_a_bad_spec_is_refused_with_field_got_and_allowed(
    change: Callable[[dict[str, Any]], object], field: str, got: str, says: str
) -> None:
    violation = refused(change)
    assert violation.field == field
    assert violation.got == got
    assert says in f"{violation.allowed} {violation.message}"


def test_a_stored_document_with_fields_of_another_version_is_read() -> None:
    spec = JobSpec.model_validate(EXAMPLE)
    stored = spec.model_dump(mode="json")
    stored["from_the_future"] = 1
    stored["training"]["optimizer"]["also_new"] = [1, 2]
    assert JobSpec.read_stored(stored) == spec


@pytest.mark.parametrize(
    ("path", "expected"),
    [("a.py", True), ("x/y/a.py", True), ("test/a.py", False), ("x/test/a.py", False), (".git/a.py", False), ("a.txt", False)],
)
def test_globs_select_files_by_relative_path(path: str, expected: bool) -> None:
    document = copy.deepcopy(EXAMPLE)
    document["data"] |= {"include": ["**/*.py"], "exclude": ["**/test/**"]}
    assert JobSpec.model_validate(document).data.selects(path) is expected


def test_folders_that_hold_nothing_are_not_entered() -> None:
    document = copy.deepcopy(EXAMPLE)
    document["data"] |= {"exclude": ["**/test/**", "build/*.py"]}
    data = JobSpec.model_validate(document).data
    assert [data.selects_nothing_below(name) for name in ("test", "a/test", ".git", "a/.git", "build", "a/tests")] == [
        *(True, True, True, True),
        *(False, False),
    ]
