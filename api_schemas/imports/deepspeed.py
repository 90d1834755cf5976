"""Read a DeepSpeed configuration as a part of a job, with MS-AMP's section `"msamp"`.

Settings, defaults and meanings are those of DeepSpeed 0.19 (deepspeed/runtime/config.py, constants.py, zero/config.py) and of
MS-AMP 0.4 (msamp/deepspeed/runtime/config.py).
"""

from collections.abc import Mapping
from typing import Any

from octet.api_schemas.accelerate import precision_from_accelerate
from octet.api_schemas.imports.accelerate import written_precision
from octet.api_schemas.imports.patch import NOTHING, Batch, Given, Patch, Section, set_batch
from octet.api_schemas.imports.shared import set_compile, set_degrees, set_offload, set_optimizer

_KEPT_FOR_EVERY_JOB = (
    *("steps_per_print", "wall_clock_breakdown", "dump_state", "tensorboard", "wandb", "comet", "csv_monitor"),
    *("comms_logger", "flops_profiler", "memory_breakdown", "monitor_config", "autotuning", "checkpoint", "elasticity"),
    *("dataloader_drop_last", "disable_allgather", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "nebula"),
    *("use_node_local_storage", "aio", "graph_harvesting", "timers"),
)
_OF_THE_ENGINE = (
    *("contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce", "sub_group_size"),
    *("allgather_partitions", "allgather_bucket_size", "overlap_comm", "compute_grad_norm", "load_from_fp32_weights"),
    *("elastic_checkpoint", "cpu_offload_use_pin_memory", "prefetch_bucket_size", "param_persistence_threshold"),
    *("model_persistence_threshold", "max_live_parameters", "max_reuse_distance", "module_granularity_threshold"),
    *("gather_16bit_weights_on_model_save", "gather_fp16_weights_on_model_save", "use_all_reduce_for_fetch_params"),
    *("allgather_sequential", "ignore_unused_parameters", "legacy_stage1", "round_robin_gradients", "parameter_alignment"),
    *("zero_hpz_partition_size", "memory_efficient_linear", "pipeline_loading_checkpoint", "override_module_apply"),
    *("log_trace_cache_warnings", "enable_sanity_checks", "leaf_module"),
)
"""Settings of ZeRO that change neither what is trained nor what a rank holds."""
_DTYPES = {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16", "bfp16": "bf16"}


def from_deepspeed(document: Mapping[str, Any], given: Given = NOTHING) -> Patch:
    """Read the JSON that `deepspeed.initialize(config=…)` takes.

    given: the number of processes, which the file does not have; the others for a file that says "auto".
    Raises ValueError, with the setting to change, for what DeepSpeed would not take either.
    """
    patch = Patch()
    config = Section(_without_auto(document, patch), patch)
    if given.workers is not None:
        patch.set("resources.workers", given.workers)
    _set_zero(config.section("zero_optimization"))
    _set_precision(config)
    tensor = config.section("tensor_parallel")
    set_degrees(tensor, {"autotp_size": "tensor"})
    tensor.finish("DeepSpeed's tensor_parallel that a job has a field for")
    if not _is_auto(patch, "gradient_clipping"):
        # DeepSpeed clips nothing by default; a job clips to 1.
        patch.set("training.gradient_clip", config.take("gradient_clipping"))
    _set_optimizer(config.section("optimizer"))
    _set_schedule(config.section("scheduler"))
    _set_step(config, given)
    if given.steps is not None:
        patch.set("training.steps", given.steps)
    _leave_the_rest(config)
    return patch


def _without_auto(document: Mapping[str, Any], patch: Patch, path: str = "") -> dict[str, Any]:
    """Return the settings without those that transformers fills in; these are left over."""
    kept: dict[str, Any] = {}
    for key, value in document.items():
        where = f"{path}{key}"
        if isinstance(value, Mapping):
            kept[key] = _without_auto(value, patch, f"{where}.")
        elif value == "auto":
            reason = "TrainingArguments have it: give these to `octet import transformers`"
            patch.leave(where, value, reason, matters=not where.startswith("zero_optimization."))
        else:
            kept[key] = value
    return kept


def _is_auto(patch: Patch, setting: str) -> bool:
    return any(left.setting == f"{setting}: auto" for left in patch.left)


def _set_precision(config: Section) -> None:
    """Set the level: MS-AMP's if its section is on, else that of fp16 or bf16, else fp32."""
    patch = config.patch
    msamp = config.section("msamp")
    halves = {"fp16": config.section("fp16"), "bf16": config.section("bf16")}
    older = config.section("bfloat16")
    autocast = config.section("torch_autocast")
    on = [name for name, half in halves.items() if half.is_on("enabled")] or ["bf16"] * older.is_on("enabled")
    if not on and autocast.is_on("enabled"):
        on = ["fp16" if "16" in (dtype := str(autocast.take("dtype") or "bfloat16")) and "b" not in dtype else "bf16"]
    if msamp.is_on("enabled"):
        options = {key: value for key in ("opt_level", "use_te") if (value := msamp.take_raw(key)) is not None}
        patch.set("precision", written_precision(precision_from_accelerate({"enabled": True, **options})))
        if on:
            reason = "the level has formats of its own, and its gradients need no scaled loss"
            patch.leave(f"{on[0]}.enabled", "true", reason, matters=False)
        _check_msamp(patch, patch.get("parallelism.zero_stage"))
    elif len(on) > 1:
        raise ValueError("fp16.enabled and bf16.enabled are both true; allowed: one of them. Remove one.")
    elif not any(_is_auto(patch, f"{half}.enabled") for half in halves):
        patch.set("precision.level", f"{on[0]}-amp" if on else "fp32")
    scaled = (
        "loss_scale",
        "initial_scale_power",
        "loss_scale_window",
        "hysteresis",
        "consecutive_hysteresis",
        "min_loss_scale",
    )
    halves["fp16"].leave_all((*scaled, "auto_cast"), "the loss is scaled as the level needs it")
    for part in (*halves.values(), older):
        narrow = ("fp16_master_weights_and_grads", "bf16_master_weights_and_grads", "bf16_optimizer_states")
        reason = "what lasts is stored as the level says: a level of O1 to O3 stores less"
        part.leave_all(narrow, reason, matters=True)
        part.drop(("check_overflow", "immediate_grad_update"))
        part.finish("DeepSpeed's halves")
    autocast.drop(("dtype", "lower_precision_safe_modules"))
    msamp.drop(("opt_level", "use_te"))
    msamp.finish("MS-AMP")


def _check_msamp(patch: Patch, stage: int) -> None:
    """Raise ValueError where MS-AMP refuses its own O3."""
    if patch.get("precision.level") == "O3" and stage not in (1, 2):
        raise ValueError(
            f"msamp.opt_level is O3 and zero_optimization.stage {stage}; allowed by MS-AMP: stage 1 or 2. Change one of them."
        )


def _set_zero(zero: Section) -> None:
    patch = zero.patch
    stage = zero.take_raw("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"{zero.path('stage')} is {stage!r}; allowed: 0, 1, 2, 3. Change it.")
    patch.set("parallelism.zero_stage", int(stage))
    for key, old, holds_weights in (
        ("offload_optimizer", "cpu_offload", False),
        ("offload_param", "cpu_offload_param", True),
    ):
        part = zero.section(key)
        device = part.take("device") or ("cpu" if zero.is_on(old) else None)
        if device is not None:
            set_offload(patch, zero.path(key), device, weights=holds_weights)
        part.drop(("pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "nvme_path", "fast_init", "pipeline_read"))
        part.drop(("pipeline_write", "pipeline", "ratio", "super_offload", "cpuadam_cores_perc"))
    rounded = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")
    zero.leave_all(
        rounded, "what travels is rounded as precision.level says: gradients of O1 to O3 travel in FP8", matters=True
    )
    tuned = [name for key in _OF_THE_ENGINE for name in (key, f"stage3_{key}")]
    zero.leave_all(tuned, "they tune DeepSpeed's exchanges; a job has its own")
    zero.finish("DeepSpeed's zero_optimization")


def _set_optimizer(optimizer: Section) -> None:
    patch = optimizer.patch
    name, numbers = optimizer.take("type"), optimizer.section("params")
    if name is None:
        optimizer.finish("DeepSpeed's optimizer")
        return
    folded = str(name).lower()
    # DeepSpeed's Adam is AdamW unless adam_w_mode is off.
    if folded == "adam" and numbers.take_raw("adam_w_mode", True):
        folded = "adamw"
    set_optimizer(patch, optimizer.path("type"), {"fusedadam": "adamw"}.get(folded, folded))
    is_torchs = numbers.take("torch_adam") is not None
    # Its defaults are not a job's.
    defaults: dict[str, Any] = {"lr": 0.001, "weight_decay": 0.01 if is_torchs and folded == "adamw" else 0.0}
    match patch.get("training.optimizer.name"):
        case "adamw" | "adam":
            defaults["betas"] = [0.9, 0.999]
        case "lion":
            defaults["betas"] = [0.9, 0.99]
        case "sgd":
            defaults["momentum"] = 0.0
    fields = {"lr": "learning_rate", "weight_decay": "weight_decay", "betas": "betas", "eps": "eps", "momentum": "momentum"}
    for key, field in fields.items():
        value = numbers.take_raw(key, defaults.get(key))
        if value is not None and not _is_auto(patch, numbers.path(key)):
            patch.set(f"training.optimizer.{field}", value)
    numbers.drop(("adam_w_mode", "bias_correction", "fp32_optimizer_states", "set_grad_none", "foreach", "fused"))
    numbers.finish("DeepSpeed's optimizer that a job has a field for")
    optimizer.leave("legacy_fusion", "it tunes DeepSpeed's kernels", matters=False)
    optimizer.finish("DeepSpeed's optimizer")


def _set_schedule(scheduler: Section) -> None:
    """Set the schedule of the learning rate. Warm-ups of a job are lines from 0."""
    patch = scheduler.patch
    name, numbers = scheduler.take("type"), scheduler.section("params")
    name = None if name is None else str(name)
    kinds = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if name not in kinds:
        if name is not None:
            reason = f"jobs have the counterparts of {', '.join(kinds)}: set training.schedule"
            patch.leave(scheduler.path("type"), name, reason, matters=True)
        return
    patch.set("training.schedule.name", kinds[name])
    if not _is_auto(patch, numbers.path("warmup_num_steps")):
        patch.set("training.schedule.warmup_steps", numbers.take_raw("warmup_num_steps", 1000))
    steps = numbers.whole("total_num_steps")
    if steps is not None:
        patch.set("training.steps", steps)
    peak = numbers.take_raw("warmup_max_lr", 0.001 if name == "WarmupDecayLR" else None)
    if peak is not None and not _is_auto(patch, numbers.path("warmup_max_lr")):
        patch.set("training.optimizer.learning_rate", peak)
    if name == "WarmupDecayLR":
        patch.set("training.schedule.final_fraction", 0.0)
    if name == "WarmupCosineLR":
        patch.set("training.schedule.final_fraction", numbers.take_raw("cos_min_ratio", 0.0001))
    shape = numbers.take_raw("warmup_type", "log")
    if shape != "linear":
        patch.leave(numbers.path("warmup_type"), shape, "the learning rate of a job rises in a line", matters=True)
    for key in ("warmup_min_lr", "warmup_min_ratio"):
        numbers.leave(key, "the learning rate of a job rises from 0", matters=True)
    numbers.drop(("last_batch_iteration",))
    numbers.finish("DeepSpeed's scheduler")


def _set_step(config: Section, given: Given) -> None:
    """Set the batch of a step, and the dtype in which gradients travel and add up."""
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    per_rank, accumulated, whole = (config.whole(name) for name in names)
    if whole is not None and per_rank is None and accumulated is None:
        # DeepSpeed takes the whole batch of a rank in one pass then, and so does a job.
        accumulated = 1
    set_batch(config.patch, Batch(given.batch_size or per_rank, accumulated, whole, names))
    dtype = config.take("communication_data_type")
    if str(dtype) in _DTYPES:
        config.patch.set("parallelism.wide_communication", _DTYPES[str(dtype)])
    elif dtype is not None:
        reason = "gradients travel in fp32, in bf16 (parallelism.wide_communication) or, at O1 to O3, in FP8"
        config.patch.leave("communication_data_type", dtype, reason, matters=True)
    types = config.section("data_types")
    sums = types.take("grad_accum_dtype")
    if sums is not None and _DTYPES.get(str(sums)) != "fp32":
        reason = "gradients add up in fp32 or, at O1 to O3, in FP8 (precision.gradient_accumulation)"
        types.patch.leave(types.path("grad_accum_dtype"), sums, reason, matters=True)
    types.finish("DeepSpeed's data_types")


def _leave_the_rest(config: Section) -> None:
    compiled = config.section("compile")
    if compiled.is_on("enabled") or compiled.is_on("deepcompile"):
        set_compile(compiled, compiled.take("backend"), None)
    compiled.drop(("kwargs", "offload_activation", "offload_opt_states", "double_buffer", "symmetric_memory"))
    recomputed = config.section("activation_checkpointing")
    recomputed.leave_all(
        ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization", "number_checkpoints"),
        "it changes what the program checkpoints itself; in a job set training.activation_checkpointing",
        matters=True,
    )
    recomputed.drop(("synchronize_checkpoint_boundary", "profile"))
    for key in ("prescale_gradients", "gradient_predivide_factor"):
        value = config.take(key)
        if value not in (None, 1, 1.0):
            config.patch.leave(key, value, "means of gradients are the same without it", matters=False)
    if config.take("sparse_gradients") is not None:
        config.patch.leave("sparse_gradients", "true", "gradients of embeddings travel dense", matters=False)
    config.drop(_KEPT_FOR_EVERY_JOB)
    for key in ("data_efficiency", "curriculum_learning", "compression_training", "amp", "sequence_parallel_size"):
        config.leave(key, "a job has no counterpart", matters=True)
    config.finish("DeepSpeed")
