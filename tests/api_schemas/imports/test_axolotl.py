"""Axolotl's files become a part of a job."""

from typing import Any

import pytest
import yaml

from octet.api_schemas import JobSpec
from octet.api_schemas.imports.axolotl import from_axolotl
from octet.api_schemas.imports.patch import Given, Patch

# The structure of Axolotl's examples/llama-3/fft-8b-liger-fsdp.yaml.
FULL = """
base_model: /models/llama
plugins: [axolotl.integrations.liger.LigerPlugin]
liger_rms_norm: true
datasets:
  - {path: data.jsonl, type: chat_template}
val_set_size: 0.02
output_dir: ./outputs/out
sequence_len: 4096
sample_packing: true
wandb_project:
gradient_accumulation_steps: 4
micro_batch_size: 2
max_steps: 400
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 2e-5
cosine_min_lr_ratio: 0.1
bf16: auto
tf32: false
gradient_checkpointing: true
resume_from_checkpoint:
logging_steps: 1
attn_implementation: flash_attention_2
warmup_ratio: 0.1
saves_per_epoch: 1
weight_decay: 0.0
fsdp: [full_shard, auto_wrap]
fsdp_config:
  fsdp_offload_params: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_sharding_strategy: FULL_SHARD
special_tokens:
  pad_token: <|end_of_text|>
"""


def full(**changes: Any) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(FULL)
    return {key: value for key, value in (document | changes).items() if value is not None}


def what_matters(patch: Patch) -> list[str]:
    return [f"{left.setting}: {left.reason}" for left in patch.left if left.matters]


def whole(patch: Patch) -> JobSpec:
    return JobSpec.model_validate({"name": "x", **patch.job, "data": {"path": "/data", **patch.job.get("data", {})}})


def test_full_fine_tuning_under_fsdp() -> None:
    patch = from_axolotl(full(), Given(workers=4))
    assert what_matters(patch) == []
    assert patch.job["parallelism"] == {"zero_stage": 3}
    assert patch.job["precision"] == {"level": "bf16-amp"}
    assert patch.job["model"] == {"path": "/models/llama"}
    assert patch.job["data"] == {"source": "jsonl", "packing": True, "evaluation_fraction": 0.02}
    training = patch.job["training"]
    assert training["schedule"] == {"name": "cosine", "warmup_steps": 40, "final_fraction": 0.1}
    assert training["optimizer"]["learning_rate"] == 2e-5
    assert (training["global_batch_size"], training["micro_batch_size"]) == (32, 2)
    assert (training["steps"], training["sequence_length"], training["activation_checkpointing"]) == (400, 4096, "full")
    assert whole(patch).batch.num_micro_batches == 4
    assert {left.setting.partition(":")[0] for left in patch.left} == {
        "fsdp_config",
        "datasets",
        "plugins, liger_rms_norm",
        "special_tokens",
    }


def test_lora_keeps_its_rank_and_targets() -> None:
    numbers = {"adapter": "lora", "lora_r": 32, "lora_alpha": 16, "lora_target_modules": ["q_proj", "v_proj"]}
    patch = from_axolotl(full(fsdp=None, fsdp_config=None, **numbers), Given(workers=1))
    assert patch.job["adapter"] == {"rank": 32, "alpha": 16, "targets": ["q_proj", "v_proj"]}
    assert what_matters(patch) == []
    adapter = whole(patch).adapter
    assert adapter is not None
    assert adapter.rank == 32
    every = from_axolotl(full(adapter="qlora", lora_target_linear=True, load_in_4bit=True, lora_dropout=0.05))
    assert every.job["adapter"] == {}
    assert [line.partition(":")[0] for line in what_matters(every)][-2:] == ["load_in_4bit", "lora_dropout"]


def test_fp8_is_torchaos_under_fsdp2() -> None:
    config = {"reshard_after_forward": True, "offload_params": False}
    fp8 = {"fp8": True, "fp8_enable_fsdp_float8_all_gather": True, "torch_compile": True, "bf16": None}
    patch = from_axolotl(full(fsdp=None, fsdp_version=2, fsdp_config=config, **fp8), Given(workers=4))
    assert patch.job["precision"]["level"] == "ao"
    assert patch.job["precision"]["skip_first_layers"] == 1
    assert patch.job["parallelism"] == {"zero_stage": 3}
    assert patch.job["training"]["compile"] == "on"
    assert what_matters(patch) == []
    assert whole(patch).precision.level == "ao"


def test_degrees_divide_the_ranks_that_read_samples() -> None:
    patch = from_axolotl(full(tensor_parallel_size=2), Given(workers=8))
    assert patch.job["parallelism"] == {"zero_stage": 3, "tensor": 2}
    assert patch.job["training"]["global_batch_size"] == 2 * 4 * 4


def test_steps_of_the_user_settle_the_warm_up() -> None:
    patch = from_axolotl(full(max_steps=None), Given(workers=4, steps=50))
    assert patch.job["training"]["schedule"]["warmup_steps"] == 5
    assert what_matters(patch) == []
    defaults = from_axolotl({"learning_rate": 1e-4}, Given(workers=4, steps=1000)).job["training"]
    assert (defaults["steps"], defaults["schedule"]["warmup_steps"]) == (1000, 30)


def test_defaults_are_axolotls() -> None:
    training = from_axolotl({"base_model": "/m", "learning_rate": "1e-4", "max_steps": 1000}, Given(workers=2)).job["training"]
    assert training["schedule"] == {"name": "cosine", "warmup_steps": 30, "final_fraction": 0.0}
    assert (training["global_batch_size"], training["micro_batch_size"], training["sequence_length"]) == (2, 1, 512)
    assert training["optimizer"]["learning_rate"] == 1e-4


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({"max_steps": None}, "warmup_ratio: 0.1: the number of steps is known with the data alone"),
        ({"optimizer": "muon"}, "optimizer: muon: jobs have the optimizers"),
        ({"deepspeed": "deepspeed_configs/zero2.json", "fsdp": None, "fsdp_config": None}, "deepspeed: deepspeed_configs"),
        ({"rl": "dpo"}, "rl: dpo: a job has no counterpart"),
        ({"new_field": 3}, "new_field: 3: no setting of Axolotl"),
        ({"val_set_size": 200}, "val_set_size: 200: it is a share of the samples"),
        ({"early_stopping_patience": 3}, "early_stopping_patience: 3: a job runs all"),
    ],
)
def test_what_matters_is_left_over_in_axolotls_words(changes: dict[str, Any], left: str) -> None:
    (line,) = what_matters(from_axolotl(full(**changes), Given(workers=4)))
    assert line.startswith(left)


def test_without_the_number_of_processes_the_batch_is_left_over() -> None:
    patch = from_axolotl(full())
    assert "global_batch_size" not in patch.job["training"]
    assert what_matters(patch)[0].startswith(
        "micro_batch_size: 2, gradient_accumulation_steps: 4: the whole batch follows from"
    )


def test_what_axolotl_would_not_take_is_refused() -> None:
    with pytest.raises(ValueError, match="micro_batch_size is 'two'; allowed: a whole number"):
        from_axolotl(full(micro_batch_size="two"))
    with pytest.raises(ValueError, match="learning_rate is 'fast'; allowed: a number"):
        from_axolotl(full(learning_rate="fast"))
