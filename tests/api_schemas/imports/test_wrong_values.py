"""A wrong value at any place of any file is read, left over or refused by a ValueError; nothing else is raised."""

import tomllib
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import pytest
import yaml

from octet.api_schemas.imports.accelerate import from_accelerate
from octet.api_schemas.imports.axolotl import from_axolotl
from octet.api_schemas.imports.deepspeed import from_deepspeed
from octet.api_schemas.imports.patch import Given, Patch
from octet.api_schemas.imports.torchtitan import from_torchtitan
from octet.api_schemas.imports.transformers import from_training_arguments
from octet.client.errors import SpecRefused
from octet.client.job_file import check_part

WRONG = (None, True, 0, -1, 2, 0.5, "x", "", "auto", "2", [1], ["a"], {"a": 1}, float("nan"))

DEEPSPEED = yaml.safe_load("""
train_batch_size: 16
gradient_accumulation_steps: 2
gradient_clipping: 1.0
optimizer: {type: Adam, params: {lr: 0.001, betas: [0.9, 0.95], adam_w_mode: true}}
scheduler: {type: WarmupCosineLR, params: {total_num_steps: 100, warmup_num_steps: 10, cos_min_ratio: 0.1, warmup_min_ratio: 0}}
bf16: {enabled: true}
fp16: {enabled: false, loss_scale: 0}
msamp: {enabled: true, opt_level: O1, use_te: true}
zero_optimization: {stage: 2, offload_optimizer: {device: cpu}, stage3_prefetch_bucket_size: 5}
tensor_parallel: {autotp_size: 2}
communication_data_type: bf16
data_types: {grad_accum_dtype: bf16}
compile: {enabled: true, backend: inductor}
activation_checkpointing: {partition_activations: true}
""")
ACCELERATE = yaml.safe_load("""
distributed_type: FSDP
num_processes: 8
mixed_precision: fp8
fp8_config: {backend: TE, margin: 1}
dynamo_config: {dynamo_backend: INDUCTOR, dynamo_mode: default}
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true, fsdp_offload_params: true, fsdp_activation_checkpointing: true}
parallelism_config: {parallelism_config_tp_size: 2, parallelism_config_dp_replicate_size: 2, parallelism_config_sp_size: 2}
deepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 4, gradient_clipping: 1.0, offload_optimizer_device: cpu}
megatron_lm_config: {megatron_lm_tp_degree: 2, megatron_lm_pp_degree: 2, megatron_lm_num_micro_batches: 4}
""")
ARGUMENTS = yaml.safe_load("""
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
max_steps: 100
num_train_epochs: 3
learning_rate: 0.0001
lr_scheduler_type: warmup_stable_decay
lr_scheduler_kwargs: {num_decay_steps: 10, min_lr: 0.00001}
warmup_steps: 0.1
optim: adamw_torch
max_grad_norm: 1.0
eval_strategy: steps
eval_steps: 0.25
save_strategy: steps
save_steps: 10
save_total_limit: 2
bf16: true
torch_compile: true
torch_compile_backend: inductor
fsdp: [full_shard]
fsdp_config: {version: 2, min_num_params: 0}
accelerator_config: {split_batches: true}
seed: 1
""")
AXOLOTL = yaml.safe_load("""
base_model: /models/llama
datasets: [{path: data.jsonl}]
micro_batch_size: 2
gradient_accumulation_steps: 4
max_steps: 100
learning_rate: 0.0001
cosine_min_lr_ratio: 0.1
warmup_ratio: 0.1
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_modules: [q_proj]
bf16: auto
fp8: false
sequence_len: 128
sample_packing: true
val_set_size: 0.1
fsdp: [full_shard]
fsdp_config: {offload_params: true}
tensor_parallel_size: 2
dp_shard_size: 2
""")
TORCHTITAN = tomllib.loads("""
[model]
name = "llama3"
converters = ["float8"]
[optimizer]
name = "AdamW"
lr = 3e-4
[lr_scheduler]
warmup_steps = 200
decay_ratio = 0.8
decay_type = "linear"
[training]
local_batch_size = 2
global_batch_size = 64
seq_len = 128
max_norm = 1.0
steps = 1000
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 2
tensor_parallel_degree = 2
pipeline_parallel_degree = 1
[checkpoint]
enable = true
interval = 250
keep_latest_k = 3
[compile]
enable = true
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[quantize.linear.float8]
recipe_name = "rowwise"
filter_fqns = ["output"]
[validation]
enable = true
steps = 20
[debug]
seed = 1
""")
FILES: dict[str, tuple[Callable[[Mapping[str, Any], Given], Patch], dict[str, Any]]] = {
    "deepspeed": (from_deepspeed, DEEPSPEED),
    "fsdp": (from_accelerate, ACCELERATE),
    "accelerate's deepspeed": (from_accelerate, ACCELERATE | {"distributed_type": "DEEPSPEED"}),
    "megatron": (from_accelerate, ACCELERATE | {"distributed_type": "MEGATRON_LM"}),
    "transformers": (from_training_arguments, ARGUMENTS),
    "transformers with deepspeed": (from_training_arguments, ARGUMENTS | {"deepspeed": DEEPSPEED}),
    "axolotl": (from_axolotl, AXOLOTL),
    "torchtitan": (from_torchtitan, TORCHTITAN),
}


def places(document: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in document.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from places(value, (*above, key))


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_value_is_read_left_over_or_refused(name: str) -> None:
    reader, document = FILES[name]
    outcomes = set()
    for place in places(document):
        for wrong in WRONG:
            changed = deepcopy(document)
            part = changed
            for key in place[:-1]:
                part = part[key]
            part[place[-1]] = wrong
            try:
                check_part(reader(changed, Given(workers=8)).job, name)
                outcomes.add("read")
            except (ValueError, SpecRefused):
                outcomes.add("refused")
    assert outcomes == {"read", "refused"}


@pytest.mark.parametrize("name", FILES)
def test_the_files_themselves_are_read(name: str) -> None:
    reader, document = FILES[name]
    check_part(reader(document, Given(workers=8)).job, name)
