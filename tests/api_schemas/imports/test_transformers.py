"""TrainingArguments that transformers itself writes become a part of a job."""

import json
from pathlib import Path
from typing import Any

import pytest

from octet.api_schemas import JobSpec
from octet.api_schemas.imports.patch import Given, Patch
from octet.api_schemas.imports.transformers import from_training_arguments


def written(folder: Path, **arguments: Any) -> dict[str, Any]:
    """Return the arguments as transformers writes them: every field, at its default too."""
    from transformers import TrainingArguments

    document: dict[str, Any] = json.loads(TrainingArguments(str(folder / "out"), use_cpu=True, **arguments).to_json_string())
    return document


def what_matters(patch: Patch) -> list[str]:
    return [f"{left.setting}: {left.reason}" for left in patch.left if left.matters]


def whole(patch: Patch) -> JobSpec:
    return JobSpec.model_validate({"name": "x", "model": "llama-tiny", "data": {"path": "/data"}, **patch.job})


def test_the_defaults_of_transformers(tmp_path: Path) -> None:
    patch = from_training_arguments(written(tmp_path), Given(workers=2))
    assert patch.left == []
    assert patch.job == {
        "resources": {"workers": 2},
        "precision": {"level": "fp32"},
        "training": {
            "epochs": 3.0,
            "checkpoint_every": 500,
            "optimizer": {
                "name": "adamw",
                "learning_rate": 5e-5,
                "weight_decay": 0.0,
                "betas": [0.9, 0.999],
                "eps": 1e-8,
            },
            "gradient_clip": 1.0,
            "seed": 42,
            "schedule": {"name": "linear", "warmup_steps": 0, "final_fraction": 0.0},
            "global_batch_size": 16,
            "micro_batch_size": 8,
        },
    }
    assert whole(patch).batch.num_micro_batches == 1


def test_a_file_of_some_arguments_has_the_same_defaults(tmp_path: Path) -> None:
    some = {"output_dir": "out", "learning_rate": 1e-4}
    every = written(tmp_path, learning_rate=1e-4)
    found = from_training_arguments(some, Given(workers=2, batch_size=8)).job
    expected = from_training_arguments(every, Given(workers=2)).job
    # Where nothing is said of checkpoints, nothing is set.
    expected["training"].pop("checkpoint_every")
    assert found == expected


def test_what_people_set(tmp_path: Path) -> None:
    arguments = {
        "max_steps": 400,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "bf16": True,
        "gradient_checkpointing": True,
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 1e-5},
        "learning_rate": 1e-4,
        "warmup_steps": 0.05,
        "eval_strategy": "steps",
        "eval_steps": 0.25,
        "save_total_limit": 2,
        "torch_compile": True,
        "seed": 7,
    }
    patch = from_training_arguments(written(tmp_path, **arguments), Given(workers=8))
    training = patch.job["training"]
    assert what_matters(patch) == []
    assert patch.job["precision"] == {"level": "bf16-amp"}
    assert training["schedule"] == {"name": "cosine", "warmup_steps": 20, "final_fraction": pytest.approx(0.1)}
    assert (training["global_batch_size"], training["micro_batch_size"]) == (64, 2)
    assert (training["steps"], training["eval_every"], training["keep"]) == (400, 100, {"last": 2})
    assert training["gradient_clip"] is None
    assert (training["compile"], training["activation_checkpointing"], training["seed"]) == ("on", "full", 7)
    assert whole(patch).batch.num_micro_batches == 4


def test_numbers_of_the_user_take_the_place_of_the_files(tmp_path: Path) -> None:
    """Steps settle the share of the warm-up, too."""
    patch = from_training_arguments(written(tmp_path, warmup_steps=0.1), Given(workers=2, batch_size=4, steps=200))
    training = patch.job["training"]
    assert (training["steps"], training["global_batch_size"], training["micro_batch_size"]) == (200, 8, 4)
    assert training["schedule"]["warmup_steps"] == 20
    assert "epochs" not in training
    assert what_matters(patch) == []


def test_without_the_number_of_processes_the_batch_is_left_over(tmp_path: Path) -> None:
    patch = from_training_arguments(written(tmp_path, gradient_accumulation_steps=4))
    assert "global_batch_size" not in patch.job["training"]
    (line,) = what_matters(patch)
    assert line.startswith("per_device_train_batch_size: 8, gradient_accumulation_steps: 4: the whole batch follows from")


@pytest.mark.parametrize(("reshard", "stage"), [(True, 3), (False, 2)])
def test_fsdp_as_transformers_writes_it(tmp_path: Path, reshard: bool, stage: int) -> None:
    config = {"version": 2, "reshard_after_forward": reshard, "activation_checkpointing": reshard}
    patch = from_training_arguments(written(tmp_path, fsdp=True, fsdp_config=config), Given(workers=4))
    assert patch.left == []
    assert patch.job["parallelism"] == {"zero_stage": stage}
    assert patch.job["training"].get("activation_checkpointing") == ("full" if reshard else None)


@pytest.mark.parametrize(
    ("fsdp", "stage"), [("full_shard auto_wrap", 3), ("shard_grad_op", 2), (["no_shard"], 0), ("", None), ([], None)]
)
def test_fsdp_in_words(fsdp: Any, stage: int | None) -> None:
    patch = from_training_arguments({"fsdp": fsdp, "fsdp_config": {"fsdp_backward_prefetch": "backward_pre"}}, Given(workers=4))
    assert what_matters(patch) == []
    assert patch.job.get("parallelism") == (None if stage is None else {"zero_stage": stage})
    offloaded = from_training_arguments({"fsdp": "full_shard offload"}, Given(workers=4, batch_size=1))
    assert what_matters(offloaded)[0].startswith("fsdp_config.offload_params: true: ranks keep their shards on the device")


def test_deepspeeds_settings_within_are_read_and_auto_is_the_arguments() -> None:
    deepspeed = {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
        "bf16": {"enabled": "auto"},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-7, "weight_decay": "auto"}},
    }
    arguments = {"bf16": True, "learning_rate": 2e-4, "weight_decay": 0.05, "max_grad_norm": 0.5, "deepspeed": deepspeed}
    patch = from_training_arguments(arguments | {"per_device_train_batch_size": 4, "max_steps": 10}, Given(workers=4))
    assert patch.left == []
    assert patch.job["parallelism"] == {"zero_stage": 2}
    assert patch.job["precision"] == {"level": "bf16-amp"}
    training = patch.job["training"]
    assert training["gradient_clip"] == 0.5
    assert training["optimizer"] == {
        "name": "adamw",
        "learning_rate": 2e-4,
        "weight_decay": 0.05,
        "betas": [0.9, 0.999],
        "eps": 1e-7,
    }
    assert whole(patch).parallelism.zero_stage == 2
    for msamp, level in (({"enabled": False}, "bf16-amp"), ({"enabled": True, "opt_level": "O2"}, "O2")):
        said = from_training_arguments(arguments | {"deepspeed": deepspeed | {"msamp": msamp}}, Given(workers=4))
        assert said.job["precision"]["level"] == level


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        ({"optim": "adafactor"}, "optim: adafactor: jobs have the optimizers adamw, adam, lion, muon, sgd"),
        ({"optim": "adamw_bnb_8bit"}, "optim: adamw_bnb_8bit: moments in 8 bits are a part of the level"),
        ({"lr_scheduler_type": "inverse_sqrt"}, "lr_scheduler_type: inverse_sqrt: jobs have the counterparts"),
        ({"warmup_steps": 0.1}, "warmup_steps: 0.1: the number of steps is known with the data alone"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha: 5.0: a job adds no noise"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size: true: a batch is given"),
    ],
)
def test_what_matters_is_left_over_by_name(tmp_path: Path, arguments: dict[str, Any], left: str) -> None:
    (line,) = what_matters(from_training_arguments(written(tmp_path, **arguments), Given(workers=2)))
    assert line.startswith(left)


def test_other_arguments() -> None:
    said = what_matters(from_training_arguments({"deepspeed": "ds.json", "packing_v9": True, "max_length": 1024}))
    assert [line.partition(":")[0] for line in said] == ["deepspeed", "packing_v9"]
    assert from_training_arguments({"max_length": 1024}).job["training"]["sequence_length"] == 1024
    with pytest.raises(ValueError, match="fp16 and bf16 are both true"):
        from_training_arguments({"fp16": True, "bf16": True})
    with pytest.raises(ValueError, match="gradient_accumulation_steps is 'two'"):
        from_training_arguments({"gradient_accumulation_steps": "two"})
