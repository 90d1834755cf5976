"""A pipeline degree: what it asks of a job, and what is refused at submission."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from octet.api_schemas import JobSpec, Layout
from tests.api_schemas.test_job_spec import EXAMPLE, refused

LLAMA = {"preset": "llama-tiny", "num_layers": 4}
TWO = {"parallelism": {"pipeline": 2, "zero_stage": 1}, "resources": {"workers": 4}, "model": LLAMA}


def staged(document: dict[str, Any], **parallelism: Any) -> dict[str, Any]:
    """The example with two stages, two data ranks, and four micro-batches for each of these."""
    document = copy.deepcopy(document) | copy.deepcopy(TWO)
    document["parallelism"].update(parallelism)
    document["training"]["micro_batch_size"] = document["training"]["global_batch_size"] // 8
    return document


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_data_ranks_are_the_workers_over_the_degree(schedule: str, zero_stage: int) -> None:
    spec = JobSpec.model_validate(staged(EXAMPLE, schedule=schedule, zero_stage=zero_stage))
    assert (spec.layout.data, spec.layout.pipeline, spec.batch.num_micro_batches) == (2, 2, 4)
    assert spec.layout.num_stages == (2 if schedule == "1f1b" else 4)


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_ranks_divide_the_blocks_of_a_stage(sequence: bool) -> None:
    """Two data ranks of two stages; two neighbouring ranks divide each stage."""
    document = staged(EXAMPLE, tensor=2, sequence=sequence) | {"resources": {"workers": 8}}
    spec = JobSpec.model_validate(document)
    assert (spec.layout.data, spec.layout.pipeline, spec.layout.tensor, spec.batch.num_micro_batches) == (2, 2, 2, 4)
    assert spec.layout.group("tensor", 5) == (4, 5)
    assert spec.layout.group("stage", 5) == (4, 5, 6, 7)


def test_175_billion_parameters_are_a_job() -> None:
    """Tensor groups of eight neighbours, 16 stages of two runs of three blocks, and eight data ranks."""
    document = copy.deepcopy(EXAMPLE) | {"model": {"preset": "gpt-175b"}, "resources": {"workers": 1024}}
    degrees = {"tensor": 8, "sequence": True, "pipeline": 16, "schedule": "interleaved", "zero_stage": 1}
    training = document["training"] | {"global_batch_size": 1536, "micro_batch_size": 1, "sequence_length": 2048}
    layout = JobSpec.model_validate(document | {"parallelism": degrees, "training": training}).layout
    assert (layout.data, layout.num_stages, layout.blocks(31, 96)) == (8, 32, range(93, 96))
    assert layout.group("tensor", 1023) == tuple(range(1016, 1024))
    assert layout.group("pipeline", 1023) == tuple(range(63, 1024, 64))


def in_training(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda d: d["training"].update(changes)


@pytest.mark.parametrize(
    ("change", "field", "got", "says"),
    [
        (lambda d: d["parallelism"].update(pipeline=0), "parallelism.pipeline", "0", "1"),
        (lambda d: d["parallelism"].update(schedule="gpipe"), "parallelism.schedule", "gpipe", "1f1b"),
        (lambda d: d["parallelism"].update(schedule="zero-bubble"), "parallelism.schedule", "zero-bubble", "in one pass"),
        (
            lambda d: d["parallelism"].update(pipeline=1, schedule="interleaved"),
            "parallelism.schedule",
            "interleaved",
            "there is no pipeline",
        ),
        (lambda d: d["parallelism"].update(context=2), "parallelism.context", "2", "tensor and data parallel ranks"),
        (
            lambda d: [d["parallelism"].update(tensor=2), d.update(resources={"workers": 6})],
            "resources.workers",
            "6",
            "a multiple of parallelism.pipeline · parallelism.tensor, 4",
        ),
        (
            lambda d: [d["parallelism"].update(tensor=2), d.update(precision={"level": "fp16-amp"})],
            "precision.level",
            "fp16-amp",
            "with parallelism.tensor: fp32, bf16-amp, te",
        ),
        (
            lambda d: [d["parallelism"].update(tensor=2), d["model"].update(num_key_value_heads=1)],
            "model.num_key_value_heads",
            "1",
            "a multiple of parallelism.tensor, 2",
        ),
        (lambda d: d["parallelism"].update(zero_stage=2), "parallelism.zero_stage", "2", "0 or 1"),
        (lambda d: d["parallelism"].update(zero_stage=3), "parallelism.zero_stage", "3", "0 or 1"),
        (lambda d: d.update(resources={"workers": 3}), "resources.workers", "3", "a multiple of parallelism.pipeline, 2"),
        (lambda d: d.update(precision={"level": "ao"}), "precision.level", "ao", "every level but ao"),
        (lambda d: d.update(model={"architecture": "qwen3", "config": {"vocab_size": 256}}), "model", "qwen3", "gpt, llama"),
        (lambda d: d.update(model={"preset": "gpt-tiny", "num_layers": 1}), "model.num_layers", "1", "at least 2"),
        (
            lambda d: [d["parallelism"].update(schedule="interleaved"), d["model"].update(num_layers=6)],
            "model.num_layers",
            "6",
            "a multiple of 4",
        ),
        (in_training(micro_batch_size=8), "training.micro_batch_size", "8", "at least 2 micro-batches"),
        (
            in_training(micro_batch_size=3),
            "training.micro_batch_size",
            "3",
            "global_batch_size · parallelism.pipeline / resources.workers",
        ),
        (in_training(global_batch_size=15), "training.global_batch_size", "15", "workers / parallelism.pipeline, 2"),
        (
            lambda d: [d["parallelism"].update(schedule="interleaved"), d["training"].update(global_batch_size=12)],
            "training.micro_batch_size",
            "2",
            "a multiple of 2 micro-batches",
        ),
        (in_training(ema_decay=0.9), "training.ema_decay", "0.9", "whole on every rank"),
        (in_training(fused_loss=True), "training.fused_loss", "True", "not been proven"),
        (in_training(saved_activations="fp8"), "training.saved_activations", "fp8", "not been proven"),
        (in_training(offload_optimizer=True), "training.offload_optimizer", "True", "not been proven"),
        (in_training(gradient_release=True, gradient_clip=None), "training.gradient_release", "True", "not been proven"),
    ],
)
def test_what_does_not_fit_a_pipeline_is_refused(
    change: Callable[[dict[str, Any]], object], field: str, got: str, says: str
) -> None:
    violation = refused(lambda d: (d.update(staged(d)), change(d)))
    assert violation.field == field
    assert got in violation.got
    assert says in violation.allowed


def test_adapters_are_refused() -> None:
    violation = refused(lambda d: d.update(staged(d) | {"adapter": {"rank": 4}}))
    assert (violation.field, violation.got) == ("parallelism.pipeline", "2")


@pytest.mark.parametrize("num_blocks", [4, 7, 12])
@pytest.mark.parametrize(("pipeline", "stages_per_rank"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_stages_divide_the_blocks(num_blocks: int, pipeline: int, stages_per_rank: int) -> None:
    layout = Layout(pipeline, pipeline=pipeline, stages_per_rank=stages_per_rank)
    runs = [layout.blocks(stage, num_blocks) for stage in range(layout.num_stages)]
    assert [block for run in runs for block in run] == list(range(num_blocks))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1
    held = [layout.stages(rank) for rank in range(pipeline)]
    assert sorted(stage for stages in held for stage in stages) == list(range(layout.num_stages))
    assert all(len(stages) == stages_per_rank for stages in held)
