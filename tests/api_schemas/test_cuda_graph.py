"""Which jobs are trained by CUDA graphs, and why others are not."""

from typing import Any

import pytest

from octet.api_schemas import JobSpec
from octet.api_schemas.rules.table import reason_against


@pytest.mark.parametrize(
    ("training", "num_ranks", "reason"),
    [
        ({}, 1, None),
        ({}, 2, None),
        ({"activation_checkpointing": "full"}, 1, "activation_checkpointing full"),
        ({"gradient_release": True, "gradient_clip": None}, 1, "gradient_release"),
        ({"offload_optimizer": True}, 1, "offload_optimizer"),
        ({"optimizer": {"name": "muon"}}, 1, "the host waits once a step of muon"),
    ],
)
def test_what_a_replay_cannot_repeat_is_named(
    spec_document: dict[str, Any], training: dict[str, Any], num_ranks: int, reason: str | None
) -> None:
    training = spec_document["training"] | training
    document = spec_document | {"precision": {"level": "O2"}, "training": training, "resources": {"workers": num_ranks}}
    spec = JobSpec.model_validate(document)
    found = reason_against("training.cuda_graph", spec)
    assert (found is None) if reason is None else (found or "").startswith(reason)


@pytest.mark.parametrize(
    ("parallelism", "reason"),
    [
        ({"zero_stage": 1}, None),
        ({"zero_stage": 2}, None),
        ({"zero_stage": 3}, "parallelism.zero_stage 3 gives weights other memory"),
        ({"tensor": 2}, "ranks meet inside of passes with parallelism.tensor 2"),
        ({"context": 2}, "ranks meet inside of passes with parallelism.context 2"),
    ],
)
def test_ranks_that_meet_in_the_exchange_alone_are_recorded(
    spec_document: dict[str, Any], parallelism: dict[str, int], reason: str | None
) -> None:
    spec = JobSpec.model_validate(spec_document | {"resources": {"workers": 2}, "parallelism": parallelism})
    found = reason_against("training.cuda_graph", spec)
    assert (found is None) if reason is None else (found or "").startswith(reason)


def test_only_families_that_are_known_not_to_wait_are_recorded(spec_document: dict[str, Any]) -> None:
    model = {"family": "huggingface", "architecture": "gpt2", "config": {"vocab_size": 256, "n_positions": 256}}
    spec = JobSpec.model_validate(spec_document | {"model": model, "training": {"steps": 4}})
    assert "model.family huggingface" in (reason_against("training.cuda_graph", spec) or "")
