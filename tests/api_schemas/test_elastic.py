"""Elastic jobs: the numbers of ranks that leave the global batch as it is, and the spec of an attempt."""

from typing import Any

import pytest
from pydantic import ValidationError

from octet.api_schemas import JobSpec


def spec(
    workers: object, *, min_workers: int | None = None, batch: int = 16, micro: int | None = None, tensor: int = 1
) -> JobSpec:
    model = {"family": "gpt", "hidden_size": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 256, "max_sequence_length": 64}
    training: dict[str, Any] = {"steps": 4, "global_batch_size": batch, "micro_batch_size": micro, "sequence_length": 32}
    resources = {"workers": workers} | ({} if min_workers is None else {"min_workers": min_workers})
    document = {
        "name": "elastic",
        "model": model,
        "data": {"path": "/data/corpus"},
        "training": training,
        "resources": resources,
    }
    return JobSpec.model_validate(document | {"parallelism": {"tensor": tensor}})


def test_a_range_is_read_as_the_most_and_the_least_and_shown_so() -> None:
    found = spec({"min": 2, "max": 8})
    assert (found.resources.workers, found.resources.min_workers) == (8, 2)
    assert JobSpec.model_validate(found.model_dump(mode="json")) == found
    assert found == spec(8, min_workers=2)


@pytest.mark.parametrize(
    ("found", "counts"),
    [
        (spec(8), (8,)),
        (spec({"min": 1, "max": 8}), (8, 4, 2, 1)),
        (spec({"min": 2, "max": 6}, batch=12), (6, 3, 2)),
        (spec({"min": 3, "max": 6}, batch=12), (6, 3)),
        (spec({"min": 1, "max": 4}, micro=4), (4, 2, 1)),
        (spec({"min": 2, "max": 8}, tensor=2), (8, 4, 2)),
        (spec({"min": 6, "max": 6}, batch=12), (6,)),
    ],
)
def test_the_numbers_of_ranks_divide_the_micro_batches_in_whole_groups(found: JobSpec, counts: tuple[int, ...]) -> None:
    assert found.worker_counts == counts
    for count in counts:
        batch = found.with_workers(count).batch
        assert batch.global_batch_size == found.batch.global_batch_size
        assert batch.micro_batch_size == found.batch.micro_batch_size
        assert batch.num_data_ranks * batch.num_micro_batches * batch.micro_batch_size == batch.global_batch_size


def test_an_attempt_is_a_job_of_its_own_number_of_ranks() -> None:
    attempt = spec({"min": 2, "max": 8}).with_workers(4)
    assert (attempt.resources.workers, attempt.resources.min_workers, attempt.layout.num_ranks) == (4, None, 4)
    assert JobSpec.model_validate(attempt.model_dump(mode="json")) == attempt
    fixed = spec(8)
    assert fixed.with_workers(8) is fixed


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        ({"workers": 4, "min_workers": 5}, "at most resources.workers, 4"),
        ({"workers": 8, "min_workers": 3}, "got 3; allowed: 8, 4, 2, 1: training.global_batch_size 16 in micro-batches of 2"),
        ({"workers": 8, "min_workers": 3, "tensor": 2}, "8, 4, 2: .* in groups of parallelism.tensor 2"),
        ({"workers": {"min": 2}}, "Give both min and max"),
        ({"workers": {"min": 2, "max": 4, "now": 3}}, "Give both min and max"),
        ({"workers": {"min": 2, "max": 4}, "min_workers": 2}, "Give both min and max"),
        ({"workers": {"min": 0, "max": 4}}, "greater than or equal to 1"),
        ({"workers": {"min": 2, "max": 5}}, "a multiple of resources.workers, 5"),
    ],
)
def test_what_cannot_be_is_refused(refused: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        spec(refused.pop("workers"), **refused)
