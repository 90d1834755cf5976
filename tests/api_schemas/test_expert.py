"""An expert degree: what it asks of a job, and what is refused at submission."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from octet.api_schemas import JobSpec
from octet.api_schemas.rules.parallelism import DEGREES
from octet.api_schemas.rules.rule import Facts
from tests.api_schemas.test_job_spec import EXAMPLE, refused

MIXTURE = {"architecture": "qwen3_moe", "config": {"vocab_size": 256, "num_experts": 8}}
TWO: dict[str, Any] = {
    "model": MIXTURE,
    "parallelism": {"expert": 2},
    "resources": {"workers": 4},
    "precision": {"level": "O2"},
    "training": EXAMPLE["training"] | {"micro_batch_size": 4, "sequence_length": 64},
}


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_its_ranks_read_different_samples(zero_stage: int) -> None:
    spec = JobSpec.model_validate(EXAMPLE | TWO | {"parallelism": {"expert": 2, "zero_stage": zero_stage}})
    assert (spec.layout.data, spec.batch.rank_batch_size) == (4, spec.training.global_batch_size // 4)
    assert spec.layout.groups("expert") == [(0, 1), (2, 3)]
    assert spec.layout.groups("expert_replicas") == [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    ("architecture", "field"),
    [("mixtral", "num_local_experts"), ("deepseek_v3", "n_routed_experts"), ("gpt_oss", "num_local_experts")],
)
def test_the_number_of_experts_is_read_under_every_name(architecture: str, field: str) -> None:
    model = {"architecture": architecture, "config": {"vocab_size": 256, field: 6}}
    assert getattr(JobSpec.model_validate(EXAMPLE | TWO | {"model": model}).model.sizes, "num_experts", None) == 6
    violation = refused(lambda document: document.update(copy.deepcopy(TWO) | {"model": model, "parallelism": {"expert": 4}}))
    assert (violation.field, violation.got) == ("model", "6 experts")


@pytest.mark.parametrize(
    ("change", "field", "got", "says"),
    [
        (lambda d: d["parallelism"].update(expert=3), "parallelism.expert", "3", "1, 2, 4, 8"),
        (lambda d: d["parallelism"].update(zero_stage=2), "parallelism.zero_stage", "2", "0 or 1 with parallelism.expert"),
        (lambda d: d.update(resources={"workers": 3}), "resources.workers", "3", "a multiple of parallelism.expert, 2"),
        (lambda d: d.update(model={"preset": "llama-tiny"}), "model", "llama-tiny", "qwen3_moe"),
        (
            lambda d: d.update(model={"architecture": "qwen3", "config": {"vocab_size": 256}}),
            "model",
            "qwen3",
            "mixtures of experts",
        ),
        (lambda d: d["precision"].update(level="bf16-amp"), "precision.level", "bf16-amp", "a layer of its own"),
        (lambda d: d["training"].update(ema_decay=0.9), "training.ema_decay", "0.9", "none with parallelism.expert"),
        (lambda d: d["training"].update(fused_loss=True), "training.fused_loss", "True", "has not been proven for experts"),
        (lambda d: d["resources"].update(min_workers=2), "resources.min_workers", "2", "null with parallelism.expert"),
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


@pytest.mark.parametrize("other", ["tensor", "context", "pipeline"])
def test_no_other_degree_goes_with_it(other: str) -> None:
    """No mixture takes these in a job; in a loop of one's own the degrees alone are checked."""
    known = {f"parallelism.{degree}": 1 for degree in ("tensor", "context", "pipeline", "expert")}
    known |= {"parallelism.sequence": False, "parallelism.schedule": "1f1b", "parallelism.zero_stage": 0}
    known |= {"parallelism.expert": 2, f"parallelism.{other}": 2, "precision.level": "O2"}
    conflict = DEGREES.first_conflict(Facts(known=known))
    assert conflict is not None
    assert (conflict.field, conflict.got) == ("parallelism.expert", "2")
    assert f"1 with parallelism.{other}" in conflict.allowed
