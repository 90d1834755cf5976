"""Read an Axolotl YAML as a part of a job.

Axolotl trains by transformers' Trainer, so most of its fields are TrainingArguments under other names, with the defaults of
Axolotl 0.1x (src/axolotl/utils/schemas/, core/builders/base.py).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octet.api_schemas.imports.accelerate import written_precision
from octet.api_schemas.imports.patch import NOTHING, Given, Patch, Section
from octet.api_schemas.imports.shared import set_degrees
from octet.api_schemas.imports.transformers import from_training_arguments
from octet.api_schemas.precision import PrecisionSpec

ARGUMENTS = {
    "micro_batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
    "sequence_len": "max_length",
}
"""The TrainingArguments of fields with names of their own."""
SAME = (
    *("gradient_accumulation_steps", "max_steps", "lr_scheduler_kwargs", "learning_rate", "weight_decay", "adam_beta1"),
    *("adam_beta2", "adam_epsilon", "max_grad_norm", "warmup_steps", "warmup_ratio", "seed", "gradient_checkpointing"),
    *("torch_compile", "torch_compile_backend", "torch_compile_mode", "fsdp", "deepspeed", "save_total_limit", "eval_steps"),
    *("eval_strategy", "save_steps", "save_strategy", "neftune_noise_alpha", "auto_find_batch_size", "group_by_length"),
    *("optim_args", "optim_target_modules", "resume_from_checkpoint", "fp16", "logging_steps"),
)
DEFAULTS: Mapping[str, Any] = {
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_epochs": 1.0,
    "optimizer": "adamw_torch_fused",
    "lr_scheduler": "cosine",
    "sequence_len": 512,
    "seed": 42,
}
_KEPT_FOR_EVERY_JOB = (
    *("output_dir", "dataset_prepared_path", "wandb_project", "wandb_entity", "wandb_watch", "wandb_name", "wandb_log_model"),
    *("wandb_run_id", "wandb_mode", "mlflow_tracking_uri", "mlflow_experiment_name", "use_tensorboard", "hub_model_id"),
    *("hub_strategy", "push_dataset_to_hub", "hf_use_auth_token", "save_first_step", "save_only_model", "save_safetensors"),
    *("saves_per_epoch", "evals_per_epoch", "eval_batch_size", "eval_sample_packing", "load_best_model_at_end", "strict"),
    *("gradient_checkpointing_kwargs", "tf32", "model_type", "tokenizer_type", "is_llama_derived_model", "flash_attention"),
    *("xformers_attention", "sdp_attention", "flex_attention", "attn_implementation", "flex_attn_compile_kwargs"),
    *("dataset_processes", "dataset_num_proc", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_drop_last"),
    *("dataloader_prefetch_factor", "ddp_timeout", "ddp_find_unused_parameters", "debug", "local_rank", "pad_to_sequence_len"),
    *("eval_table_size", "eval_max_new_tokens", "gc_steps", "low_cpu_mem_usage", "device_map"),
    *("fsdp_final_state_dict_type", "shuffle_merged_datasets", "train_on_inputs", "chat_template", "tokenizer_config"),
    *("trust_remote_code", "base_model_config", "lora_model_dir", "lora_fan_in_fan_out"),
)


def from_axolotl(document: Mapping[str, Any], given: Given = NOTHING) -> Patch:
    """Read a configuration of `axolotl train`.

    given: the number of processes, which the file does not have.
    Raises ValueError, with the field to change, for what Axolotl would not take either.
    """
    try:
        patch = from_training_arguments(_arguments(document, given), given)
    except ValueError as error:
        raise ValueError(_in_axolotls_words(str(error))) from error
    patch.left = [replace(left, setting=_in_axolotls_words(left.setting)) for left in patch.left]
    read = {*ARGUMENTS, *SAME, "fsdp_config", "fsdp_version", "cosine_min_lr_ratio"}
    config = Section({key: value for key, value in document.items() if key not in read}, patch)
    _set_precision(config)
    _set_ranks(config)
    _set_adapter(config)
    _set_model_and_data(config)
    _leave_the_rest(config)
    return patch


def _arguments(document: Mapping[str, Any], given: Given) -> dict[str, Any]:
    """Return the TrainingArguments that Axolotl makes of its fields."""
    said: dict[str, Any] = {**DEFAULTS} | {key: value for key, value in document.items() if value is not None}
    arguments = {name: said[key] for key, name in ARGUMENTS.items()} | {key: said[key] for key in SAME if key in said}
    low = said.get("cosine_min_lr_ratio")
    if low is not None and arguments["lr_scheduler_type"] == "cosine":
        arguments |= {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": low}}
    if not {"warmup_steps", "warmup_ratio"} & said.keys():
        steps = given.steps or said.get("max_steps")
        if isinstance(steps, int) and steps > 0:
            arguments["warmup_steps"] = min(int(0.03 * steps), 100)
        else:
            arguments["warmup_ratio"] = 0.03
    for every, strategy in (("eval_steps", "eval_strategy"), ("save_steps", "save_strategy")):
        if every in said:
            arguments.setdefault(strategy, "steps")
    fsdp = said.get("fsdp_config") or {}
    if not isinstance(fsdp, Mapping):
        raise ValueError(f"fsdp_config is {fsdp!r}; allowed: a part with settings of its own. Change it.")
    fsdp = dict(fsdp)
    if "fsdp_version" in said:
        fsdp["version"] = said["fsdp_version"]
    if fsdp:
        arguments |= {"fsdp_config": fsdp, "fsdp": said.get("fsdp") or True}
    return arguments


def _in_axolotls_words(text: str) -> str:
    for ours, theirs in ARGUMENTS.items():
        text = text.replace(theirs, ours)
    return text


def _set_precision(config: Section) -> None:
    """Set the level of fp8, bf16 or fp16; Axolotl's default is bf16 where the device has it."""
    patch = config.patch
    if config.is_on("fp8"):
        # By Accelerate's own choice of layers: all but the first and the last.
        level = PrecisionSpec.model_validate(
            {"level": "ao", "torchao": {"pad_inner_dim": True}, "skip_first_layers": 1, "skip_last_layers": 1}
        )
        patch.set("precision", written_precision(level))
        config.take("bf16")
    elif config.take_raw("bf16", "auto") not in (False, "false", "no", None):
        patch.set("precision.level", "bf16-amp")
    reason = "it is of torch's FSDP2; a job gathers as parallelism.wide_communication says"
    config.leave("fp8_enable_fsdp_float8_all_gather", reason, matters=False)


def _set_ranks(config: Section) -> None:
    """Set the degrees. The batch that was set before counts ranks without them, so it is divided again."""
    patch = config.patch
    before = patch.num_data_ranks
    set_degrees(config, {"tensor_parallel_size": "tensor", "context_parallel_size": "context"})
    after, whole = patch.num_data_ranks, patch.get("training.global_batch_size")
    if before and after and whole:
        patch.set("training.global_batch_size", whole // before * after)
    if (config.whole("dp_shard_size") or 1) > 1 and patch.get("parallelism.zero_stage") is None:
        patch.set("parallelism.zero_stage", 3)
    config.leave("dp_replicate_size", "all ranks that read samples shard together, across nodes too", matters=False)
    config.leave("ring_attn_func", "ranks gather keys and values in the place of a ring", matters=False)
    config.leave("heads_k_stride", "ranks gather keys and values in the place of a ring", matters=False)


def _set_adapter(config: Section) -> None:
    patch = config.patch
    kind = config.take("adapter")
    numbers = {"rank": config.whole("lora_r"), "alpha": config.take("lora_alpha")}
    targets, is_every = config.take("lora_target_modules"), config.is_on("lora_target_linear")
    if kind in ("lora", "qlora"):
        for field, value in numbers.items():
            if value is not None:
                patch.set(f"adapter.{field}", value)
        if isinstance(targets, list) and not is_every:
            patch.set("adapter.targets", targets)
        elif isinstance(targets, str) and not is_every:
            reason = "targets are globs over names of layers: set adapter.targets"
            patch.leave("lora_target_modules", targets, reason, matters=True)
        patch.job.setdefault("adapter", {})
    elif kind is not None:
        patch.leave("adapter", kind, "a job trains LoRA, or the whole model", matters=True)
    is_in_4_bits = config.is_on("load_in_4bit")
    reason = "a frozen weight is held as precision.level says: at O3 as FP8 codes, a byte each"
    if is_in_4_bits or kind == "qlora":
        patch.leave("load_in_4bit", "true", reason, matters=True)
    config.leave("load_in_8bit", reason, matters=True)
    config.leave("lora_dropout", "adapters have no dropout", matters=True)
    config.leave("lora_modules_to_save", "what has no adapter is frozen", matters=True)


def _set_model_and_data(config: Section) -> None:
    patch = config.patch
    model = config.take("base_model")
    if isinstance(model, str) and model.startswith("/"):
        patch.set("model.path", model)
    elif model is not None:
        reason = "hubs are not asked: download it below a data root and give its folder by --model"
        patch.leave("base_model", model, reason, matters=False)
    if config.take("datasets") is not None:
        patch.set("data.source", "jsonl")
        reason = "give --data, a JSONL of messages, or of prompts and completions"
        patch.leave("datasets", "…", reason, matters=False)
    if config.is_on("sample_packing"):
        patch.set("data.packing", True)
    held_out = config.take("val_set_size")
    if isinstance(held_out, float) and held_out < 1:
        patch.set("data.evaluation_fraction", held_out)
    elif held_out is not None:
        patch.leave("val_set_size", held_out, "it is a share of the samples: set data.evaluation_fraction", matters=True)


def _leave_the_rest(config: Section) -> None:
    kernels = [key for key in config.keys if key.startswith(("liger_", "lora_mlp_", "lora_qkv_", "lora_o_", "cut_cross_"))]
    config.leave_all(["plugins", *kernels], "blocks are compiled, and training.fused_loss computes the loss in pieces: set it")
    config.leave("special_tokens", "they are the tokenizer's: data.tokenizer or the model's folder", matters=False)
    config.leave("early_stopping_patience", "a job runs all of its training.steps or training.epochs", matters=True)
    for key in ("bfloat16", "float16"):
        config.leave(key, "what lasts is stored as precision.level says: a level of O1 to O3 stores less", matters=True)
    for key in ("rl", "reward_model", "pretraining_dataset", "test_datasets", "relora", "unfrozen_parameters", "lr_groups"):
        config.leave(key, "a job has no counterpart", matters=True)
    config.drop(_KEPT_FOR_EVERY_JOB)
    config.finish("Axolotl")
