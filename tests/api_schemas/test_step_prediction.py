"""The predicted range of a step: around what was published, above the floor, and absent where it would be a guess."""

from typing import Any

import pytest

from octet.api_schemas import JobSpec
from octet.api_schemas.plan import missing_in
from octet.api_schemas.planned_states import states_of
from octet.api_schemas.resources import PoolConfig
from octet.api_schemas.step_floor import step_floor
from octet.api_schemas.step_prediction import StepRange, step_prediction

TRAINING = {"steps": 1000, "global_batch_size": 8, "sequence_length": 8192, "activation_checkpointing": "selective"}


def predicted(level: str, device: str | None = "H100 80GB HBM3", exchanged: Any = None, **parts: Any) -> StepRange | None:
    document = {
        "name": "predicted",
        "model": {"preset": "llama-8b"},
        "precision": {"level": level},
        "data": {"source": "tokens", "path": "/data"},
        "training": TRAINING,
        "parallelism": {"zero_stage": 3},
        "resources": {"pool": "gpu", "workers": 8},
    }
    spec = JobSpec.model_validate(document | parts)
    pool = PoolConfig(
        name="gpu", node_label=("pool", "gpu"), slots=8, accelerator="cuda", memory_per_device_bytes=8 * 10**10, device=device
    )
    states = states_of(spec, spec.model.sizes)
    found, floor = (
        step_prediction(spec, spec.model.sizes, states, pool, exchanged),
        step_floor(spec, spec.model.sizes, states, pool),
    )
    if found is not None:
        assert floor is not None
        assert floor.step_s < found.least_s < found.most_s
    return found


@pytest.mark.parametrize(("level", "tokens_per_s"), [("bf16-amp", 6667), ("te", 8532)])
def test_published_runs_lie_in_the_range(level: str, tokens_per_s: float) -> None:
    """torchtitan's Llama 3 8B with FSDP and selective checkpointing on 8 H100, in bf16 and with torchao's float8, by rank."""
    found = predicted(level)
    assert found is not None
    assert found.least_s < 8192 / tokens_per_s < found.most_s
    assert found.most_s < 3 * found.least_s


def test_fp8_is_predicted_faster_and_recomputing_slower() -> None:
    wide, narrow = predicted("bf16-amp"), predicted("te")
    again = predicted("bf16-amp", training=TRAINING | {"activation_checkpointing": "full"})
    assert wide is not None
    assert narrow is not None
    assert again is not None
    assert narrow.least_s < wide.least_s < again.least_s
    assert narrow.most_s < wide.most_s


def test_fast_accumulation_of_input_gradients_shortens_the_longer_end() -> None:
    """One of a layer's three products takes a tenth less; the shorter end takes all three as fast already."""
    precise, fast = (predicted("O2", precision={"level": "O2", "recipe": recipe}) for recipe in ({}, {"fast_grad_input": True}))
    assert precise is not None
    assert fast is not None
    assert fast.least_s == precise.least_s
    assert 0.96 < fast.most_s / precise.most_s < 0.999


def test_without_a_device_or_a_trace_of_divided_layers_nothing_is_predicted() -> None:
    assert predicted("O2", None) is None
    assert predicted("O2", parallelism={"tensor": 2}) is None


def test_what_ranks_of_a_layer_exchange_takes_time() -> None:
    nothing, much = (
        predicted("O2", exchanged={"tensor": {"exchange": {"bfloat16": num_bytes}}}, parallelism={"tensor": 2})
        for num_bytes in (0, 10**10)
    )
    assert nothing is not None
    assert much is not None
    assert much.most_s - nothing.most_s == pytest.approx(10**10 / (0.8 * 450e9))
    assert much.least_s == nothing.least_s, "it may be hidden"


def test_ranks_of_a_pipeline_wait_less_with_more_micro_batches() -> None:
    few, many = (
        predicted("O2", exchanged={}, parallelism={"pipeline": 4}, training=TRAINING | sizes)
        for sizes in ({"micro_batch_size": 4, "global_batch_size": 32}, {"micro_batch_size": 1, "global_batch_size": 32})
    )
    assert few is not None
    assert many is not None
    # 4 micro-batches of a replica or 16, over four ranks; weights are read once for each.
    assert few.least_s / many.least_s == pytest.approx((1 + 3 / 4) / (1 + 3 / 16), rel=0.1)


def test_a_pool_says_what_its_plans_lack() -> None:
    bare = PoolConfig(name="h100", node_label=("pool", "h100"), slots=8, accelerator="cuda")
    memory, device = missing_in(bare)
    assert memory.startswith("pool 'h100' states no memory: set its memory_per_device_bytes")
    assert device.startswith("pool 'h100' names no device: set its device to one of GB200, ")
    assert missing_in(bare.model_copy(update={"memory_per_device_bytes": 1, "device": "H200"})) == ()
