"""DeepSpeed's configurations become a part of a job, MS-AMP's section too."""

from copy import deepcopy
from typing import Any

import pytest

from octet.api_schemas import JobSpec
from octet.api_schemas.imports.deepspeed import from_deepspeed
from octet.api_schemas.imports.patch import Given, Patch

# The structure of MS-AMP's examples/ds_config_zero_msamp.json.
MSAMP: dict[str, Any] = {
    "train_batch_size": 16,
    "steps_per_print": 2000,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "fp16": {"enabled": True, "fp16_master_weights_and_grads": False, "loss_scale": 0, "initial_scale_power": 15},
    "msamp": {"enabled": True, "opt_level": "O3"},
    "wall_clock_breakdown": False,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 50000000, "overlap_comm": True, "cpu_offload": False},
}
# As transformers' documentation and Accelerate's examples have it, where TrainingArguments fill in the rest.
AUTO: dict[str, Any] = {
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto", "warmup_type": "linear"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def changed(document: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """Return a document with other parts; None removes one."""
    return {key: value for key, value in (deepcopy(document) | parts).items() if value is not None}


def what_matters(patch: Patch) -> list[str]:
    return [f"{left.setting}: {left.reason}" for left in patch.left if left.matters]


def whole(patch: Patch) -> JobSpec:
    base = {"name": "x", "model": "gpt-tiny", "data": {"path": "/data"}, **patch.job}
    return JobSpec.model_validate(base | {"training": {"steps": 2000, **patch.job.get("training", {})}})


def test_ms_amps_section_and_all_around_it() -> None:
    patch = from_deepspeed(MSAMP, Given(workers=4))
    assert patch.job["precision"]["level"] == "O3"
    assert patch.job["parallelism"] == {"zero_stage": 2}
    assert patch.job["training"] == {
        "gradient_clip": 1.0,
        "optimizer": {"name": "adamw", "learning_rate": 0.001, "weight_decay": 3e-7, "betas": [0.8, 0.999], "eps": 1e-8},
        "schedule": {"name": "constant", "warmup_steps": 1000},
        "global_batch_size": 16,
    }
    assert what_matters(patch) == ["scheduler.params.warmup_type: log: the learning rate of a job rises in a line"]
    assert whole(patch).batch.rank_batch_size == 4


@pytest.mark.parametrize(
    ("section", "level", "scaling"),
    [
        ({"enabled": True}, "O1", "current"),
        ({"enabled": True, "opt_level": "O2"}, "O2", "current"),
        ({"enabled": True, "opt_level": "O3", "use_te": True}, "O3", "delayed"),
    ],
)
def test_ms_amps_own_defaults(section: dict[str, Any], level: str, scaling: str) -> None:
    precision = from_deepspeed(changed(MSAMP, msamp=section)).job["precision"]
    assert (precision["level"], precision["recipe"]["scaling"]) == (level, scaling)


@pytest.mark.parametrize(
    ("parts", "level"),
    [
        ({"msamp": {"enabled": False}}, "fp16-amp"),
        ({"msamp": None}, "fp16-amp"),
        ({"msamp": None, "fp16": None, "bf16": {"enabled": True}}, "bf16-amp"),
        ({"msamp": None, "fp16": {"enabled": False}, "bfloat16": {"enabled": True}}, "bf16-amp"),
        ({"msamp": None, "fp16": None, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "bf16-amp"),
        ({"msamp": None, "fp16": None, "torch_autocast": {"enabled": True, "dtype": "float16"}}, "fp16-amp"),
        ({"msamp": None, "fp16": None}, "fp32"),
    ],
)
def test_each_half_is_a_level(parts: dict[str, Any], level: str) -> None:
    assert from_deepspeed(changed(MSAMP, **parts)).job["precision"] == {"level": level}


@pytest.mark.parametrize(
    ("batch", "workers", "expected"),
    [
        ({"train_batch_size": 64}, None, (64, None)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, None, (64, 4)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, 8, (64, 2)),
        ({"train_micro_batch_size_per_gpu": 4}, 8, (32, 4)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, 8, (64, 4)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, 8, (64, 4)),
    ],
)
def test_the_batch_of_each_spelling(batch: dict[str, int], workers: int | None, expected: tuple[int, int | None]) -> None:
    patch = from_deepspeed(changed(MSAMP, train_batch_size=None) | batch, Given(workers=workers))
    training = patch.job["training"]
    assert (training["global_batch_size"], training.get("micro_batch_size")) == expected
    assert len(what_matters(patch)) == 1  # the form of the warm-up


def test_a_batch_that_needs_the_number_of_processes_says_so() -> None:
    alone = changed(MSAMP, train_batch_size=None, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2)
    patch = from_deepspeed(alone)
    assert "global_batch_size" not in patch.job["training"]
    assert (
        "train_micro_batch_size_per_gpu: 4, gradient_accumulation_steps: 2: the whole batch follows" in what_matters(patch)[1]
    )
    divided = from_deepspeed(changed(MSAMP, gradient_accumulation_steps=4))
    assert divided.job["training"]["global_batch_size"] == 16
    assert "give --workers" in what_matters(divided)[1]


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        ("Adam", {}, {"name": "adamw", "learning_rate": 0.001, "weight_decay": 0.0, "betas": [0.9, 0.999]}),
        ("Adam", {"adam_w_mode": False}, {"name": "adam", "learning_rate": 0.001, "weight_decay": 0.0, "betas": [0.9, 0.999]}),
        ("AdamW", {"torch_adam": True}, {"name": "adamw", "learning_rate": 0.001, "weight_decay": 0.01, "betas": [0.9, 0.999]}),
        ("Lion", {"lr": 1e-4}, {"name": "lion", "learning_rate": 1e-4, "weight_decay": 0.0, "betas": [0.9, 0.99]}),
        ("SGD", {"lr": 0.1}, {"name": "sgd", "learning_rate": 0.1, "weight_decay": 0.0, "momentum": 0.0}),
    ],
)
def test_optimizers_with_deepspeeds_defaults(kind: str, params: dict[str, Any], expected: dict[str, Any]) -> None:
    patch = from_deepspeed(changed(MSAMP, scheduler=None, optimizer={"type": kind, "params": params}))
    assert patch.job["training"]["optimizer"] == expected
    assert what_matters(patch) == []
    assert whole(patch).training.optimizer.name == expected["name"]


def test_schedules_with_an_end() -> None:
    cosine = {"total_num_steps": 500, "warmup_num_steps": 50, "warmup_type": "linear", "cos_min_ratio": 0.05}
    patch = from_deepspeed(changed(MSAMP, scheduler={"type": "WarmupCosineLR", "params": cosine}))
    assert patch.job["training"]["schedule"] == {"name": "cosine", "warmup_steps": 50, "final_fraction": 0.05}
    assert patch.job["training"]["steps"] == 500
    assert what_matters(patch) == []
    cycle = from_deepspeed(changed(MSAMP, scheduler={"type": "OneCycle", "params": {}}))
    assert what_matters(cycle)[0].startswith("scheduler.type: OneCycle: jobs have the counterparts of WarmupLR")


def test_what_transformers_fills_in_is_left_over_and_not_guessed() -> None:
    patch = from_deepspeed(AUTO)
    assert patch.job == {
        "parallelism": {"zero_stage": 3},
        "training": {"optimizer": {"name": "adamw"}, "schedule": {"name": "constant"}},
    }
    assert {line.partition(":")[0] for line in what_matters(patch)} == {
        *("fp16.enabled", "bf16.enabled", "gradient_accumulation_steps", "gradient_clipping", "train_batch_size"),
        *("train_micro_batch_size_per_gpu", "optimizer.params.lr", "optimizer.params.betas", "optimizer.params.weight_decay"),
        *("scheduler.params.warmup_num_steps", "scheduler.params.warmup_max_lr"),
    }


def test_offload_and_what_else_matters() -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "zero_quantized_gradients": True}
    parts = {"zero_optimization": zero, "communication_data_type": "fp16", "new_engine": {"on": True}, "scheduler": None}
    found = what_matters(from_deepspeed(changed(MSAMP, **parts), Given(workers=8)))
    assert [line.partition(":")[0] for line in found] == [
        "zero_optimization.offload_optimizer",
        "zero_optimization",
        "communication_data_type",
        "new_engine",
    ]
    alone = changed(MSAMP, zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}}, msamp=None)
    patch = from_deepspeed(alone, Given(workers=1))
    assert patch.job["training"]["offload_optimizer"] is True
    assert patch.job["parallelism"]["zero_stage"] == 0
    assert whole(patch).training.offload_optimizer


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ({"bf16": {"enabled": True}, "msamp": None}, "fp16.enabled and bf16.enabled are both true"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4; allowed: 0, 1, 2, 3"),
        ({"zero_optimization": {"stage": 3}}, "msamp.opt_level is O3 and zero_optimization.stage 3; allowed by MS-AMP"),
        ({"msamp": {"enabled": True, "opt_level": "03"}}, "Did you mean 'O3', with the letter O"),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}, "train_batch_size is 16; allowed: 24"),
        ({"gradient_accumulation_steps": 3}, "train_batch_size is 16; allowed: a multiple of gradient_accumulation_steps 3"),
        ({"fp16": True}, "fp16 is True; allowed: a part with settings of its own"),
    ],
)
def test_what_deepspeed_would_not_take_is_refused(parts: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint.replace(".", r"\.").replace("?", r"\?")):
        from_deepspeed(changed(MSAMP, **parts), Given(workers=4))
