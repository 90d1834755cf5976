"""Which jobs may compile the blocks of their model, and why others may not."""

from typing import Any

import pytest
from pydantic import ValidationError

from octet.api_schemas import JobSpec
from octet.api_schemas.rules.table import reason_against

TRACED: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"zero_stage": 1}),
    (2, {"tensor": 2}),
    (2, {"pipeline": 2}),
    (4, {"pipeline": 2, "tensor": 2}),
]
UNTRACED: list[tuple[int, dict[str, Any], str]] = [
    (2, {"context": 2}, "with parallelism.context 2 torch cannot trace"),
    (2, {"tensor": 2, "sequence": True}, "with parallelism.sequence layers take FP8 codes"),
]


def job(spec_document: dict[str, Any], workers: int, parallelism: dict[str, Any], compiling: str) -> dict[str, Any]:
    training = spec_document["training"] | {"micro_batch_size": 2, "global_batch_size": 8, "compile": compiling}
    of_ranks = {"resources": {"workers": workers}, "parallelism": parallelism}
    model = spec_document["model"] | {"num_layers": 2}
    return spec_document | {"model": model, "precision": {"level": "O2"}, "training": training} | of_ranks


@pytest.mark.parametrize(("workers", "parallelism"), TRACED)
def test_ranks_that_only_add_up_inside_of_blocks_compile_them(
    spec_document: dict[str, Any], workers: int, parallelism: dict[str, Any]
) -> None:
    for compiling in ("auto", "on"):
        spec = JobSpec.model_validate(job(spec_document, workers, parallelism, compiling))
        assert reason_against("training.compile", spec) is None


@pytest.mark.parametrize(("workers", "parallelism", "reason"), UNTRACED)
def test_what_cannot_be_traced_is_not_compiled(
    spec_document: dict[str, Any], workers: int, parallelism: dict[str, Any], reason: str
) -> None:
    spec = JobSpec.model_validate(job(spec_document, workers, parallelism, "auto"))
    assert (reason_against("training.compile", spec) or "").startswith(reason)
    with pytest.raises(ValidationError, match=f"got on; allowed: off or auto: {reason}"):
        JobSpec.model_validate(job(spec_document, workers, parallelism, "on"))
