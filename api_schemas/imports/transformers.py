"""Read transformers' TrainingArguments, as `to_json_string` or `HfArgumentParser` have them, as a part of a job.

Fields and defaults are those of transformers 5.17. `to_json_string` writes every field, so one at its default says nothing
where a job has no counterpart.
"""

from collections.abc import Mapping
from typing import Any

from octet.api_schemas.imports.deepspeed import from_deepspeed
from octet.api_schemas.imports.patch import NOTHING, Batch, Given, Patch, Section, set_batch
from octet.api_schemas.imports.shared import set_compile, set_optimizer, set_sharding, set_warmup

_KEPT_FOR_EVERY_JOB = (
    *("output_dir", "logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node", "logging_nan_inf_filter"),
    *("include_num_input_tokens_seen", "include_tokens_per_second", "log_level", "log_level_replica", "disable_tqdm"),
    *("report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "logging_dir"),
    *("per_device_eval_batch_size", "prediction_loss_only", "eval_on_start", "eval_do_concat_batches", "eval_delay"),
    *("eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics", "save_only_model"),
    *("save_on_each_node", "save_safetensors", "enable_jit_checkpoint", "push_to_hub", "hub_token", "hub_private_repo"),
    *("hub_model_id", "hub_strategy", "hub_always_push", "hub_revision", "load_best_model_at_end", "metric_for_best_model"),
    *("greater_is_better", "ignore_data_skip", "restore_callback_states_from_checkpoint", "data_seed", "use_cpu"),
    *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor"),
    *("dataloader_multiprocessing_context", "dataloader_in_order", "dataloader_drop_last", "remove_unused_columns"),
    *("label_names", "length_column_name", "debug", "skip_memory_metrics", "do_train", "do_eval", "do_predict", "local_rank"),
    *("average_tokens_across_devices", "bf16_full_eval", "fp16_full_eval", "tf32", "torch_empty_cache_steps", "use_cache"),
    *(
        "gradient_checkpointing_kwargs",
        "liger_kernel_config",
        "use_mps_device",
        "no_cuda",
        "overwrite_output_dir",
        "jit_mode_eval",
    ),
    *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend"),
    *("ddp_timeout", "past_index", "fp16_opt_level", "fp16_backend", "half_precision_backend", "torchdynamo", "ray_scope"),
)
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "polynomial": "polynomial",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "warmup_stable_decay",
}


def from_training_arguments(document: Mapping[str, Any], given: Given = NOTHING) -> Patch:
    """Read the arguments of a Trainer, or of TRL's SFTTrainer for what they share.

    given: the number of processes, which the arguments do not have.
    Raises ValueError, with the argument to change, for what transformers would not take either.
    """
    patch = Patch()
    arguments = Section(document, patch)
    if given.workers is not None:
        patch.set("resources.workers", given.workers)
    _set_precision(arguments)
    _set_length(arguments, given)
    _set_optimization(arguments)
    if arguments.is_on("gradient_checkpointing"):
        patch.set("training.activation_checkpointing", "full")
    backend, mode = arguments.take("torch_compile_backend"), arguments.take("torch_compile_mode")
    if arguments.is_on("torch_compile") or backend is not None:
        set_compile(Section({}, patch, "torch_compile"), backend, mode)
    _set_engines(arguments, given)
    asked = arguments.whole("per_device_train_batch_size")
    set_batch(
        patch,
        Batch(
            given.batch_size or asked,
            arguments.whole("gradient_accumulation_steps"),
            names=("per_device_train_batch_size", "gradient_accumulation_steps", "the whole batch"),
        ),
    )
    _leave_the_rest(arguments)
    return patch


def _set_precision(arguments: Section) -> None:
    halves = [half for half in ("fp16", "bf16") if arguments.is_on(half)]
    if len(halves) == 2:
        raise ValueError("fp16 and bf16 are both true; allowed: one of them. Remove one.")
    arguments.patch.set("precision.level", f"{halves[0]}-amp" if halves else "fp32")


def _set_length(arguments: Section, given: Given) -> None:
    """Set steps or epochs, evaluations and checkpoints, and the length of a sequence where SFTConfig has it."""
    patch = arguments.patch
    steps, epochs = arguments.number("max_steps", -1), arguments.number("num_train_epochs", 3.0)
    steps = given.steps or steps
    if steps > 0:
        patch.set("training.steps", steps)
    else:
        patch.set("training.epochs", epochs)
    logging_steps = arguments.number("logging_steps", 500)
    for strategy, steps_of, field, default in (
        ("eval_strategy", "eval_steps", "eval_every", logging_steps),
        ("save_strategy", "save_steps", "checkpoint_every", 500),
    ):
        asked, every = str(arguments.take_raw(strategy, "no")), arguments.number(steps_of, default)
        if asked == "steps":
            _set_every(patch, steps_of, field, every)
        elif asked not in ("no", "False"):
            patch.leave(strategy, asked, f"it is a number of steps: set training.{field}", matters=False)
    kept = arguments.whole("save_total_limit")
    if kept is not None:
        patch.set("training.keep.last", kept)
    for key in ("max_length", "max_seq_length"):
        length = arguments.whole(key)
        if length is not None:
            patch.set("training.sequence_length", length)


def _set_every(patch: Patch, setting: str, field: str, every: float) -> None:
    """Set a number of steps between two evaluations or checkpoints; below 1 it is a share of all steps."""
    steps = patch.get("training.steps")
    if 0 < every < 1:
        if steps is None:
            patch.leave(setting, every, f"it is a number of steps: set training.{field}", matters=False)
            return
        every = max(1, round(every * steps))
    patch.set(f"training.{field}", int(every))


def _set_optimization(arguments: Section) -> None:
    patch = arguments.patch
    set_optimizer(patch, "optim", arguments.take_raw("optim", "adamw_torch_fused"))
    rate = arguments.number("learning_rate", 5e-5)
    patch.set("training.optimizer.learning_rate", rate)
    patch.set("training.optimizer.weight_decay", arguments.take_raw("weight_decay", 0.0))
    betas = [arguments.take_raw("adam_beta1", 0.9), arguments.take_raw("adam_beta2", 0.999)]
    eps = arguments.take_raw("adam_epsilon", 1e-8)
    match patch.get("training.optimizer.name"):
        case "adamw" | "adam":
            patch.set("training.optimizer.betas", betas)
            patch.set("training.optimizer.eps", eps)
        case "lion":
            patch.set("training.optimizer.betas", betas)
        case "sgd":
            patch.set("training.optimizer.momentum", 0.0)
    clip = arguments.take_raw("max_grad_norm", 1.0)
    patch.set("training.gradient_clip", clip or None)
    patch.set("training.seed", arguments.take_raw("seed", 42))
    if arguments.is_on("full_determinism"):
        patch.set("training.deterministic", True)
    smoothing = arguments.take("label_smoothing_factor")
    if smoothing is not None:
        patch.set("training.label_smoothing", smoothing)
    _set_schedule(arguments, rate)


def _set_schedule(arguments: Section, rate: float) -> None:
    """Set the schedule. transformers goes down to 0 where nothing else is said."""
    patch = arguments.patch
    name = str(arguments.take_raw("lr_scheduler_type", "linear"))
    numbers = arguments.section("lr_scheduler_kwargs")
    steps, ratio = patch.get("training.steps"), arguments.take_raw("warmup_ratio")
    warmup = arguments.take_raw("warmup_steps", 0)
    if name not in SCHEDULES:
        reason = f"jobs have the counterparts of {', '.join(SCHEDULES)}: set training.schedule"
        patch.leave("lr_scheduler_type", name, reason, matters=True)
        return
    patch.set("training.schedule.name", SCHEDULES[name])
    if name != "constant":
        setting, value = ("warmup_ratio", ratio) if ratio and not warmup else ("warmup_steps", warmup)
        set_warmup(patch, setting, value, steps)
    shares = [numbers.number(key, 0.0) for key in ("min_lr_rate", "min_lr_ratio")]
    lowest = numbers.number("lr_end", 1e-7) if name == "polynomial" else numbers.number("min_lr", 0.0)
    low = max(shares) or (lowest / rate if rate > 0 else 0.0)
    if name == "polynomial":
        numbers.copy("power", "training.schedule.power")
    if SCHEDULES[name] != "constant":
        patch.set("training.schedule.final_fraction", low)
    decay = numbers.whole("num_decay_steps")
    if decay is not None and steps is not None:
        patch.set("training.schedule.decay_fraction", decay / steps)
    elif decay is not None:
        reason = "it is a share of all steps, which are known with the data alone: set training.schedule.decay_fraction"
        patch.leave(numbers.path("num_decay_steps"), decay, reason, matters=True)
    numbers.finish("transformers' schedules that a job has a field for")


def _set_engines(arguments: Section, given: Given) -> None:
    """Set what FSDP and DeepSpeed shard."""
    patch = arguments.patch
    fsdp, config = arguments.take("fsdp"), arguments.take("fsdp_config") or {}
    if fsdp is not None and isinstance(config, Mapping):
        words = fsdp.split() if isinstance(fsdp, str) else fsdp if isinstance(fsdp, list) else []
        _set_fsdp(patch, config, words)
    elif fsdp is not None:
        patch.leave("fsdp_config", config, "the settings are in that file: write them in its place", matters=True)
    deepspeed = arguments.take("deepspeed")
    if isinstance(deepspeed, Mapping):
        _merge_deepspeed(patch, from_deepspeed(deepspeed, given))
    elif deepspeed is not None:
        reason = "the settings are in that file: give it to `octet import deepspeed`"
        patch.leave("deepspeed", deepspeed, reason, matters=True)
    arguments.leave("parallelism_config", "set parallelism.tensor and context", matters=True)


def _set_fsdp(patch: Patch, config: Mapping[str, Any], words: list[str]) -> None:
    """Set what FSDP shards from the words of transformers' `fsdp`, such as full_shard and auto_wrap, and its configuration."""
    values = {str(key).removeprefix("fsdp_"): value for key, value in config.items()}
    for word in words:
        if word == "offload":
            values["offload_params"] = True
        elif word != "auto_wrap":
            values.setdefault("sharding_strategy", word)
    section = Section(values, patch, "fsdp_config")
    section.drop(("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings"))
    set_sharding(section, default_version=1)
    section.finish("FSDP")


def _merge_deepspeed(patch: Patch, other: Patch) -> None:
    """Take from DeepSpeed's settings what the arguments do not have; "auto" there means the arguments."""
    patch.job["parallelism"] = other.job["parallelism"]
    training = other.job["training"]
    if training.get("offload_optimizer"):
        patch.set("training.offload_optimizer", True)
    for part in ("optimizer", "schedule"):
        patch.job["training"].setdefault(part, {}).update(training.get(part, {}))
    if str(other.get("precision.level")).startswith("O"):
        # MS-AMP's section, which the arguments have no field for.
        patch.job["precision"] = other.job["precision"]
    batches = ("train_", "gradient_accumulation_steps")
    patch.left += [left for left in other.left if not left.setting.endswith(": auto") and not left.setting.startswith(batches)]


def _leave_the_rest(arguments: Section) -> None:
    sampling = str(arguments.take_raw("train_sampling_strategy", "random"))
    if sampling != "random" or arguments.is_on("group_by_length"):
        reason = "samples are shuffled by training.seed"
        arguments.patch.leave("train_sampling_strategy", sampling, reason, matters=False)
    accelerator = arguments.section("accelerator_config")
    if accelerator.is_on("split_batches"):
        reason = "per_device_train_batch_size is then the batch of all processes: set training.global_batch_size"
        accelerator.patch.leave(accelerator.path("split_batches"), "true", reason, matters=True)
    reason = "blocks are compiled, and training.fused_loss computes the loss from pieces of the logits: set it"
    arguments.leave("use_liger_kernel", reason, matters=False)
    arguments.leave("auto_find_batch_size", "a batch is given, and `octet plan` says what fits", matters=True)
    arguments.leave("neftune_noise_alpha", "a job adds no noise to embeddings", matters=True)
    for key in ("optim_args", "optim_target_modules"):
        arguments.leave(key, "set training.optimizer", matters=True)
    reason = "a job goes on from its own checkpoint; to start from weights set model.path"
    arguments.leave("resume_from_checkpoint", reason, matters=True)
    arguments.drop(_KEPT_FOR_EVERY_JOB)
    arguments.finish("TrainingArguments")
