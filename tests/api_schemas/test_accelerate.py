"""An Accelerate configuration is read as a job's precision: every option, every alias, and the messages for wrong ones."""

from typing import Any

import pytest
from pydantic import ValidationError

from octet.api_schemas import JobSpec, explain


def job(precision: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "x",
            "model": {"preset": "gpt-tiny"},
            "data": {"path": "/data"},
            "training": {"steps": 2},
            "precision": precision,
        }
    )


TE = {
    "backend": "TE",
    "margin": 2,
    "interval": 4,
    "fp8_format": "E4M3",
    "amax_history_length": 32,
    "amax_compute_algorithm": "max",
    "override_linear_precision": "(true, false, True)",
    "use_autocast_during_eval": True,
}


def test_every_option_of_transformer_engine() -> None:
    precision = job(TE).precision
    assert precision.level == "te"
    assert precision.recipe is not None
    assert precision.recipe.model_dump() == {
        "scaling": "delayed",
        "granularity": "tensor",
        "format": "E4M3",
        "margin": 2,
        "interval": 4,
        "amax_history_length": 32,
        "amax_compute_algorithm": "max",
        "high_precision_gemms": ("output", "grad_weight"),
        "fp8_in_evaluation": True,
        "fast_grad_input": False,
    }


def test_a_whole_config_is_taken_as_it_stands_and_echoed_resolved() -> None:
    config = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": "fp8", "fp8_config": TE, "num_processes": 1}
    spec = job(config)
    assert spec.precision == job(TE).precision
    assert spec.model_dump(mode="json")["precision"]["recipe"]["amax_history_length"] == 32
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize("value", ["(false, false, false)", "false,false,false", [False, False, False], (False, False, False)])
def test_override_is_read_in_each_spelling(value: Any) -> None:
    recipe = job({"backend": "te", "override_linear_precision": value}).precision.recipe
    assert recipe is not None
    assert recipe.high_precision_gemms == ()


@pytest.mark.parametrize(
    ("block", "level"),
    [
        ({"backend": "MSAMP", "opt_level": "O1"}, "O1"),
        ({"backend": "MSAMP", "optimization_level": "o2"}, "O2"),
        ({"backend": "AO", "pad_inner_dim": True}, "ao"),
        ({"mixed_precision": "bf16"}, "bf16-amp"),
        ({"mixed_precision": "fp16"}, "fp16-amp"),
        ({"mixed_precision": "no"}, "fp32"),
    ],
)
def test_backends_and_mixed_precision(block: dict[str, Any], level: str) -> None:
    assert job(block).precision.level == level


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ({"backend": "TE", "amax_histry_len": 3}, "Did you mean 'amax_history_len'"),
        ({"backend": "MSAMP", "opt_level": "02"}, "with the letter O"),
        ({"backend": "TE", "fp8_format": "E5M2"}, "HYBRID, E4M3"),
        ({"backend": "TPU"}, "AO, TE, MSAMP"),
        ({"backend": "TE", "override_linear_precision": "(true, false)"}, "three booleans"),
        ({"backend": "TE", "use_mxfp8_block_scaling": True, "amax_compute_algo": "max"}, "Remove amax_compute_algo"),
    ],
)
def test_a_wrong_option_is_refused_with_what_to_change(block: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        job(block)
    (violation,) = explain(caught.value, JobSpec)
    assert violation.field == "precision"
    assert says in violation.message
