"""A residual stream in bf16 on real ranks (gloo): jobs whose ranks divide blocks, layers, tokens and weights."""

from typing import Any

import pytest
import torch

from tests.worker.parallel.pipeline_runs import LLAMA, STEPS, Jobs, Result, document, precision
from tests.worker.parallel.tensor_runs import LOSS_TOLERANCE

TO_THE_BIT: dict[str, dict[str, Any]] = {
    "stages": {"pipeline": 2, "schedule": "interleaved"},
    "ZeRO 3": {"zero_stage": 3},
}
"""The ranks of stages take one process's steps, those of ZeRO 3 the steps of ZeRO 2."""
DIVIDED: dict[str, dict[str, Any]] = {
    "layers": {"tensor": 2},
    "layers and tokens": {"tensor": 2, "sequence": True},
    "sequences": {"context": 2},
}
BF16_LOSS_TOLERANCE = LOSS_TOLERANCE["fp8"] + 2.0**-10
"""Ranks round their partial sums to bf16, and add up to a stream whose last bit is 2^-8."""
BF16_NORM_TOLERANCE = 2e-2
"""Measured with sequences that ranks divide, whose FP8 gradients draw other numbers: 1.3e-2, and 6e-3 with a stream in fp32."""


def with_residual(jobs: Jobs, level: str, workers: int = 1, **parallelism: Any) -> dict[str, Any]:
    job = document(jobs.corpus, LLAMA, precision(level), workers, **parallelism)
    return job | {"training": job["training"] | {"residual_stream": "bf16"}}


@pytest.fixture(
    scope="module", params=[pytest.param("O2", marks=pytest.mark.system), pytest.param("bf16-amp", marks=pytest.mark.matrix)]
)
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    torch.set_num_threads(1)
    found, level = Jobs(tmp_path_factory.mktemp("residual")), request.param
    found.run({"alone": with_residual(found, level)}, 1)
    ways = TO_THE_BIT | DIVIDED | {"ZeRO 2": {"zero_stage": 2}}
    found.run({name: with_residual(found, level, 2, **way) for name, way in ways.items()}, 2)
    return found


def first(jobs: Jobs, name: str) -> Result:
    return jobs.found[name][0]


@pytest.mark.parametrize(("name", "other"), [("stages", "alone"), ("ZeRO 3", "ZeRO 2")])
def test_stages_and_divided_weights_change_no_bit(jobs: Jobs, name: str, other: str) -> None:
    for key in ("losses", "norms", "evaluation"):
        assert first(jobs, name)[key] == first(jobs, other)[key]
    assert jobs.differences(name, other) == []


@pytest.mark.parametrize("name", DIVIDED)
def test_divided_layers_and_tokens_train_as_one_process_does(jobs: Jobs, name: str) -> None:
    assert first(jobs, name)["losses"] == pytest.approx(first(jobs, "alone")["losses"], rel=BF16_LOSS_TOLERANCE)
    assert first(jobs, name)["norms"] == pytest.approx(first(jobs, "alone")["norms"], rel=BF16_NORM_TOLERANCE)


def test_hidden_states_and_their_gradients_travel_in_bf16(jobs: Jobs) -> None:
    """The count is that of `test_pipeline.py` for fp32, with 2 bytes for each element."""
    micro_batch, evaluation = 2 * 16 * 64 * 2, 8 * 16 * 64 * 2
    assert first(jobs, "stages")["sent"]["send"] == {"bfloat16": STEPS * 4 * 3 * micro_batch + 2 * 2 * evaluation}
