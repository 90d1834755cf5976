"""The exports that a job cannot have are refused at submission, with what to change."""

from typing import Any

import pytest

from octet.api_schemas import ExportSpec, JobSpec
from tests.api_schemas.test_job_spec import EXAMPLE, refused

TRAINING = EXAMPLE["training"]


def with_export(export: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return EXAMPLE | {"precision": {"level": "O3"}, "export": export} | changes


@pytest.mark.parametrize(
    ("export", "changes", "field", "allowed"),
    [
        ({}, {"model": {"entrypoint": "a.b:c"}}, "export", "none with this family"),
        ({"format": "fp8"}, {"precision": {"level": "fp32"}}, "export.format", "bf16 or fp32 at level fp32"),
        ({"format": "fp8"}, {"adapter": {}, "model": {"path": "/m"}}, "export.format", "bf16 or fp32 with adapter"),
        ({"format": "fp8", "layout": "hf-fp8-block"}, {}, "export.activations", "dynamic with layout hf-fp8-block"),
        ({"layout": "hf-fp8-block"}, {}, "export.layout", "compressed-tensors with format bf16"),
        ({"activations": "dynamic"}, {}, "export.activations", "none with format bf16"),
        (
            {"format": "fp8", "layout": "hf-fp8-block", "activations": "static"},
            {},
            "export.activations",
            "dynamic with layout hf-fp8-block",
        ),
        ({"format": "fp8", "calibration_tokens": 1}, {}, "export.calibration_tokens", "none with activations none"),
        ({"merge": True}, {}, "export.merge", "false without adapter"),
        ({"target": "/models"}, {}, "export.target", "a URL"),
        ({"target": "s3://key:secret@models/a"}, {}, "export.target", "a URL"),
        ({"target": "s3://models/../others"}, {}, "export.target", "a URL"),
        ({"max_kl_divergence": 1, "compared_tokens": 0}, {}, "export.max_kl_divergence", "none with compared_tokens 0"),
        ({"when": "best"}, {"training": TRAINING | {"eval_every": 0}}, "training.eval_every", "at least 1"),
        ({"when": "best"}, {"training": TRAINING | {"eval_every": 1, "keep": {"best": 0}}}, "training.keep.best", "at least 1"),
    ],
    ids=str,
)
def test_what_cannot_be_exported_is_refused(export: dict[str, Any], changes: dict[str, Any], field: str, allowed: str) -> None:
    violation = refused(lambda document: document.update(with_export(export, **changes)))
    assert (violation.field, violation.allowed.partition(": ")[0]) == (field, allowed)
    assert violation.message


A_TASK: dict[str, Any] = {"path": "/tasks", "tasks": ["a"]}
EVERY = A_TASK | {"every": 50}


def every_checkpoint(**training: Any) -> dict[str, Any]:
    return {"export": {"when": "every_checkpoint"}, "training": TRAINING | training}


@pytest.mark.parametrize(
    ("evaluation", "changes", "field", "allowed"),
    [
        (A_TASK, {"export": None}, "evaluation", "with export"),
        (A_TASK, {"model": {"family": "roberta", "preset": "roberta-tiny"}}, "evaluation", "with models that predict the next"),
        (A_TASK | {"path": "tasks"}, {}, "evaluation.path", "an absolute path"),
        (EVERY, {}, "evaluation.every", "0 with export.when end"),
        (EVERY, every_checkpoint(checkpoint_every=0), "training.checkpoint_every", "at least 1 with evaluation.every"),
        (EVERY, every_checkpoint(eval_every=0), "training.eval_every", "at least 1 with evaluation.every"),
        (EVERY, every_checkpoint(checkpoint_every=20), "evaluation.every", "a multiple of training.checkpoint_every, 20"),
        (EVERY, every_checkpoint(eval_every=20), "evaluation.every", "a multiple of training.eval_every, 20"),
    ],
    ids=str,
)
def test_what_cannot_be_evaluated_is_refused(
    evaluation: dict[str, Any], changes: dict[str, Any], field: str, allowed: str
) -> None:
    document = with_export({}) | {"evaluation": evaluation} | changes
    violation = refused(lambda whole: whole.update(document))
    assert violation.field == field
    assert violation.allowed.startswith(allowed)


def test_names_of_forms_differ() -> None:
    """Exports of one step in several forms lie next to one another."""
    forms: list[dict[str, Any]] = [{"format": format} for format in ("fp8", "bf16", "fp32")]
    forms += [{"format": "fp8", "activations": "dynamic"}, {"format": "fp8", "activations": "static"}, {"merge": True}]
    forms.append({"format": "fp8", "activations": "dynamic", "layout": "hf-fp8-block"})
    assert len({ExportSpec.model_validate(form).label for form in forms}) == len(forms)
    assert JobSpec.model_validate(with_export(forms[-1])).export == ExportSpec.model_validate(forms[-1])
