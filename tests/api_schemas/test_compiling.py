"""Which jobs compile the blocks of their model, and why others do not."""

from typing import Any

import pytest

from api_schemas import JobSpec
from api_schemas.compiling import why_not_compiled


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"resources": {"workers": 2}, "parallelism": {"zero_stage": 1}}, None),
        ({"resources": {"workers": 2}, "parallelism": {"tensor": 2}}, "with parallelism.tensor 2"),
        ({"resources": {"workers": 2}, "parallelism": {"context": 2}}, "with parallelism.context 2"),
        ({"training": {"saved_activations": "fp8"}}, None),
    ],
)
def test_blocks_that_are_not_whole_are_not_compiled(
    spec_document: dict[str, Any], changes: dict[str, Any], reason: str | None
) -> None:
    training = spec_document["training"] | changes.get("training", {})
    spec = JobSpec.model_validate(spec_document | {"precision": {"level": "O2"}} | changes | {"training": training})
    found = why_not_compiled(spec.layout)
    assert (found is None) if reason is None else (found or "").startswith(reason)
