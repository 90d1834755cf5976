"""The least time of a step: below what was published, less in FP8, and absent where nothing is known."""

from typing import Any

import pytest
from pydantic import ValidationError

from octet.api_schemas import JobSpec
from octet.api_schemas.planned_states import states_of
from octet.api_schemas.resources import PoolConfig
from octet.api_schemas.step_floor import StepFloor, step_floor

GPU = {"name": "gpu", "node_label": ("pool", "gpu"), "slots": 8, "accelerator": "cuda", "memory_per_device_bytes": 80 * 10**9}


def floor(level: str, device: str | None = "H100 80GB HBM3", price: float | None = None, **parts: Any) -> StepFloor | None:
    document = {
        "name": "floor",
        "model": {"preset": "llama-8b"},
        "precision": {"level": level},
        "data": {"source": "tokens", "path": "/data"},
        "training": {"steps": 1000, "global_batch_size": 8, "sequence_length": 8192},
        "parallelism": {"zero_stage": 3},
        "resources": {"pool": "gpu", "workers": 8},
    }
    spec = JobSpec.model_validate(document | parts)
    pool = PoolConfig.model_validate(GPU | {"device": device, "slot_hour_price": price})
    return step_floor(spec, spec.model.sizes, states_of(spec, spec.model.sizes), pool)


@pytest.mark.parametrize(("level", "tokens_per_s"), [("bf16-amp", 6667), ("te", 8532)])
def test_no_published_run_is_faster(level: str, tokens_per_s: float) -> None:
    """torchtitan's Llama 3 8B with FSDP on 8 H100, compiled, in bf16 and with torchao's float8, by rank."""
    found = floor(level)
    assert found is not None
    assert 0.2 * 8192 / tokens_per_s < found.step_s < 8192 / tokens_per_s
    assert found.step_s == max(found.products_s, found.sent_s) + found.update_s


def test_a_step_in_bf16_computes_six_flops_a_weight_and_token() -> None:
    """By hand, of a GPT without attention's share: 124 million weights and 8,192 tokens."""
    short = {"training": {"steps": 10, "global_batch_size": 4096, "sequence_length": 2}, "resources": {"pool": "gpu"}}
    found = floor("bf16-amp", model={"preset": "gpt-125m"}, parallelism={}, **short)
    assert found is not None
    assert found.products_s == pytest.approx(6 * 124e6 * 8192 / 989.4e12, rel=0.01)
    assert found.sent_s == 0
    assert found.update_s == pytest.approx(124.4e6 * (2 * 8 + 4) / 3.35e12, rel=0.01)


def test_fp8_halves_the_products_of_converted_layers_alone() -> None:
    wide, narrow = floor("bf16-amp"), floor("te")
    on_old = floor("te", "A100"), floor("bf16-amp", "A100")
    assert wide is not None
    assert narrow is not None
    assert 0.5 < narrow.products_s / wide.products_s < 0.75
    assert on_old[0] is not None
    assert on_old[1] is not None
    assert on_old[0].products_s == on_old[1].products_s


def test_hours_and_price_are_of_all_steps_and_workers() -> None:
    found = floor("O2", price=2.5)
    assert found is not None
    assert found.hours == pytest.approx(1000 * found.step_s / 3600)
    assert found.price == pytest.approx(found.hours * 8 * 2.5)
    in_epochs = {"training": {"epochs": 1, "global_batch_size": 8, "sequence_length": 8192}}
    open_end = floor("O2", price=2.5, **in_epochs)
    assert open_end is not None
    assert (open_end.hours, open_end.price) == (None, None)


def test_without_a_device_nothing_is_said() -> None:
    assert floor("O2", None) is None


@pytest.mark.parametrize("changes", [{"device": "H100"}, {"device": "L4", "accelerator": "cpu"}])
def test_a_device_that_is_not_in_the_table_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="with accelerator cuda, one of GB200"):
        PoolConfig.model_validate(GPU | changes)
