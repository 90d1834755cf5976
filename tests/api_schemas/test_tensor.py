"""A tensor degree: what it asks of a job, and what is refused at submission."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from octet.api_schemas import JobSpec
from tests.api_schemas.test_job_spec import EXAMPLE, refused

TWO = {"parallelism": {"tensor": 2}, "resources": {"workers": 4}}
LLAMA = {"preset": "llama-tiny"}
READERS = "workers / parallelism.tensor, 2"


def of_transformers(architecture: str, vocab_size: int) -> dict[str, Any]:
    return {"architecture": architecture, "config": {"vocab_size": vocab_size}}


def on_two(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    def both(document: dict[str, Any]) -> None:
        document |= copy.deepcopy(TWO)
        change(document)

    return both


@pytest.mark.parametrize("model", [{"preset": "gpt-tiny"}, LLAMA, of_transformers("qwen3", 256)])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_data_ranks_are_the_workers_over_the_degree(model: dict[str, Any], zero_stage: int) -> None:
    spec = JobSpec.model_validate(
        EXAMPLE
        | TWO
        | {
            "model": model,
            "parallelism": {"tensor": 2, "zero_stage": zero_stage},
            "training": EXAMPLE["training"] | {"micro_batch_size": 8},
        }
    )
    assert (spec.layout.data, spec.batch.rank_batch_size) == (2, 8)


@pytest.mark.parametrize(
    ("change", "field", "got", "says"),
    [
        (lambda d: d["parallelism"].update(tensor=3), "parallelism.tensor", "3", "1, 2, 4, 8"),
        (lambda d: d.update(resources={"workers": 3}), "resources.workers", "3", "a multiple of parallelism.tensor, 2"),
        (lambda d: d.update(parallelism={"tensor": 8}, resources={"workers": 8}), "model.num_heads", "4", "a multiple of"),
        (lambda d: d.update(model=LLAMA | {"vocab_size": 257}), "model.vocab_size", "257", "a multiple of"),
        (lambda d: d.update(model=LLAMA | {"num_key_value_heads": 1}), "model.num_key_value_heads", "1", "a multiple of"),
        (lambda d: d.update(model=of_transformers("phi3", 256)), "model", "phi3", "gpt, llama"),
        (
            lambda d: d.update(model=of_transformers("qwen3", 257)),
            "model.config.vocab_size",
            "257",
            "of",
        ),
        (
            lambda d: (d["parallelism"].update(sequence=True), d["training"].update(sequence_length=65)),
            "training.sequence_length",
            "65",
            "a multiple of parallelism.tensor, 2",
        ),
        (lambda d: d["parallelism"].update(tensor=1, sequence=True), "parallelism.sequence", "True", "false with"),
        (lambda d: d["precision"].update(level="ao"), "precision.level", "ao", "bf16-amp"),
        (lambda d: d["precision"].update(level="fp16-amp"), "precision.level", "fp16-amp", "bf16-amp"),
        (lambda d: d["training"].update(ema_decay=0.9), "training.ema_decay", "0.9", "none with parallelism.tensor"),
        (lambda d: d.update(adapter={"rank": 4}), "parallelism.tensor", "2", "1 with adapter"),
        (
            lambda d: d["training"].update(global_batch_size=15),
            "training.global_batch_size",
            "15",
            "workers / parallelism.tensor, 2",
        ),
        (
            lambda d: d["training"].update(micro_batch_size=16),
            "training.micro_batch_size",
            "16",
            "parallelism.tensor / resources.workers, 8",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(change: Callable[[dict[str, Any]], object], field: str, got: str, says: str) -> None:
    violation = refused(on_two(change))
    assert (violation.field, violation.got) == (field, got)
    assert says in violation.allowed
