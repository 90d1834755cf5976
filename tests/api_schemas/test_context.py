"""A context degree: what it asks of a job, and what is refused at submission."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from octet.api_schemas import JobSpec
from tests.api_schemas.test_job_spec import EXAMPLE, refused

TWO: dict[str, Any] = {"parallelism": {"context": 2}, "resources": {"workers": 4}}


@pytest.mark.parametrize("model", [{"preset": "gpt-tiny"}, {"preset": "llama-tiny"}])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_data_ranks_are_the_workers_over_the_degree(model: dict[str, Any], zero_stage: int) -> None:
    parallelism = {"context": 2, "zero_stage": zero_stage}
    training = EXAMPLE["training"] | {"micro_batch_size": 8}
    spec = JobSpec.model_validate(EXAMPLE | TWO | {"model": model, "parallelism": parallelism, "training": training})
    assert (spec.layout.data, spec.batch.rank_batch_size) == (2, 8)


@pytest.mark.parametrize("sequence", [False, True])
def test_it_goes_with_a_tensor_degree(sequence: bool) -> None:
    parallelism = {"context": 2, "tensor": 2, "sequence": sequence, "zero_stage": 2}
    training = EXAMPLE["training"] | {"micro_batch_size": 8}
    degrees = {"parallelism": parallelism, "resources": {"workers": 8}, "training": training}
    spec = JobSpec.model_validate(EXAMPLE | degrees)
    assert (spec.layout.data, spec.layout.group("replicas", 1), spec.layout.group("context", 1)) == (2, (1, 3, 5, 7), (1, 3))


@pytest.mark.parametrize(
    ("change", "field", "got", "says"),
    [
        (lambda d: d["parallelism"].update(context=3), "parallelism.context", "3", "1, 2, 4, 8"),
        (
            lambda d: (d["parallelism"].update(tensor=2), d.update(resources={"workers": 6})),
            "resources.workers",
            "6",
            "a multiple of parallelism.tensor · parallelism.context, 4",
        ),
        (
            lambda d: (
                d["parallelism"].update(tensor=4, sequence=True),
                d.update(resources={"workers": 8}),
                d["training"].update(sequence_length=60),
            ),
            "training.sequence_length",
            "60",
            "a multiple of parallelism.tensor · parallelism.context, 8, with parallelism.sequence",
        ),
        (lambda d: d.update(resources={"workers": 3}), "resources.workers", "3", "a multiple of parallelism.context, 2"),
        (
            lambda d: d.update(model={"architecture": "qwen3", "config": {"vocab_size": 256}}),
            "model",
            "qwen3",
            "gpt, llama",
        ),
        (lambda d: d["training"].update(sequence_length=62), "training.sequence_length", "62", "2 · parallelism.context, 4"),
        (lambda d: d["precision"].update(level="fp16-amp"), "precision.level", "fp16-amp", "bf16-amp"),
        (lambda d: d["precision"].update(level="ao"), "precision.level", "ao", "bf16-amp"),
        (lambda d: d["training"].update(ema_decay=0.9), "training.ema_decay", "0.9", "whole sequences"),
        (lambda d: d["training"].update(compile="on"), "training.compile", "on", "off or auto"),
        (lambda d: d["training"].update(fused_loss=True), "training.fused_loss", "True", "has not been proven for tokens"),
        (
            lambda d: d["training"].update(global_batch_size=15),
            "training.global_batch_size",
            "15",
            "workers / parallelism.context, 2",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused(
    change: Callable[[dict[str, Any]], object], field: str, got: str, says: str
) -> None:
    def on_two(document: dict[str, Any]) -> None:
        document |= copy.deepcopy(TWO)
        change(document)

    violation = refused(on_two)
    assert (violation.field, violation.got) == (field, got)
    assert says in violation.allowed
