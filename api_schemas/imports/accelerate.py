"""Read Hugging Face Accelerate's config.yaml as a part of a job.

Accelerate 1.15 writes it by `accelerate config`. Batch, clipping outside of DeepSpeed, optimizer and schedule are in the user's
script, and not in this file.
"""

from collections.abc import Mapping
from typing import Any

from octet.api_schemas.accelerate import TOP_LEVEL_KEYS, check_keys, precision_from_accelerate
from octet.api_schemas.imports.patch import NOTHING, Batch, Given, Patch, Section, set_batch
from octet.api_schemas.imports.shared import set_clip, set_compile, set_degrees, set_offload, set_sharding
from octet.api_schemas.precision import PrecisionSpec

_LAUNCH = (
    *("command_file", "commands", "compute_environment", "debug", "enable_cpu_affinity", "gpu_ids", "machine_rank"),
    *("main_process_ip", "main_process_port", "main_training_function", "mpirun_config", "num_machines", "rdzv_backend"),
    *("same_network", "use_cpu"),
)
"""Settings of a launch, which a pool of workers has no use for."""
_TPU = ("downcast_bf16", "tpu_env", "tpu_name", "tpu_use_cluster", "tpu_use_sudo", "tpu_zone")


def from_accelerate(document: Mapping[str, Any], given: Given = NOTHING) -> Patch:
    """Read a whole config.yaml, or an `fp8_config` block.

    given: workers in the place of num_processes; the batch size and the steps, which the file does not have.
    Raises ValueError, with the key to change, for what Accelerate would not take either.
    """
    patch = Patch()
    if not document.keys() & (TOP_LEVEL_KEYS - {"fp8_config"}):
        _set_precision(patch, document)
        return patch
    check_keys(document)
    config = Section(document, patch)
    kind = str(config.take("distributed_type") or "NO").upper()
    asked = config.take("num_processes")
    if (num_processes := given.workers or asked) is not None:
        # A launcher counts for itself where the file has -1.
        if isinstance(num_processes, int) and num_processes > 0:
            patch.set("resources.workers", num_processes)
        else:
            patch.leave("num_processes", num_processes, "give the number of workers by --workers", matters=True)
    precision = {key: config.take_raw(key) for key in ("mixed_precision", "fp8_config")}
    said = {key: value for key, value in precision.items() if value is not None}
    if said:
        _set_precision(patch, said)
    accumulated = _set_kind(config, kind)
    _set_compile(config.section("dynamo_config", "dynamo_"))
    set_batch(patch, Batch(given.batch_size, accumulated))
    if given.steps is not None:
        patch.set("training.steps", given.steps)
    config.drop(_LAUNCH)
    config.leave_all(_TPU, "jobs run on GPUs and CPUs", matters=True)
    config.leave("ipex_config", "jobs compute by torch's own kernels on CPUs", matters=False)
    config.finish("Accelerate")
    return patch


def _set_precision(patch: Patch, document: Mapping[str, Any]) -> None:
    precision = precision_from_accelerate(document)
    patch.set("precision", written_precision(precision))
    for setting in precision.not_applied:
        name, _, reason = setting.partition(": ")
        patch.leave(name, "true", reason, matters=False)


def written_precision(precision: PrecisionSpec) -> dict[str, Any]:
    """Return a precision as a person writes it: the level, what differs from defaults, and the whole recipe."""
    written = precision.model_dump(mode="json", exclude_defaults=True, exclude={"not_applied"})
    if precision.resolved_recipe is not None:
        written["recipe"] = precision.resolved_recipe.model_dump(mode="json")
    return {"level": precision.level} | written


def _set_kind(config: Section, kind: str) -> int | None:
    """Set what a job shards and divides. Returns the forward passes of a process in a step, if the file says it."""
    patch = config.patch
    accumulated = None
    fsdp, deepspeed = config.section("fsdp_config", "fsdp_"), config.section("deepspeed_config")
    megatron, parallelism = (
        config.section("megatron_lm_config", "megatron_lm_"),
        config.section("parallelism_config", "parallelism_config_"),
    )
    match kind:
        case "NO" | "MULTI_GPU" | "MULTI_CPU":
            pass
        case "FSDP":
            _set_degrees(parallelism)
            set_sharding(fsdp, default_version=1)
            fsdp.leave("activation_checkpointing_offload", "activations stay on the device", matters=True)
            fsdp.finish("Accelerate's FSDP")
        case "DEEPSPEED":
            accumulated = _set_deepspeed(deepspeed)
        case "MEGATRON_LM":
            accumulated = _set_megatron(megatron)
        case _:
            patch.leave("distributed_type", kind, "jobs run on GPUs and CPUs", matters=True)
    return accumulated


def _set_degrees(parallelism: Section) -> None:
    patch = parallelism.patch
    set_degrees(parallelism, {"tp_size": "tensor", "cp_size": "context"})
    sizes = {key: parallelism.whole(key) or 1 for key in ("dp_replicate_size", "dp_shard_size")}
    if sizes["dp_replicate_size"] > 1:
        reason = "all ranks that read samples shard together, across nodes too"
        patch.leave(parallelism.path("dp_replicate_size"), sizes["dp_replicate_size"], reason, matters=False)
    parallelism.drop(("cp_comm_strategy", "cp_backend", "sp_backend"))
    sp_size = parallelism.whole("sp_size")
    if sp_size is not None and sp_size > 1:
        reason = "ranks that divide sequences are parallelism.context, which gathers keys in the place of heads: set it"
        patch.leave(parallelism.path("sp_size"), sp_size, reason, matters=True)
    parallelism.finish("Accelerate's parallelism_config")


def _set_deepspeed(deepspeed: Section) -> int | None:
    """Set ZeRO's stage, offload and clipping. Returns the forward passes of a process in a step."""
    patch = deepspeed.patch
    file = deepspeed.take("deepspeed_config_file")
    if file is not None:
        reason = "the settings are in that file: give it to `octet import deepspeed`"
        patch.leave(deepspeed.path("deepspeed_config_file"), file, reason, matters=True)
    else:
        # Accelerate's own default.
        stage = deepspeed.take_raw("zero_stage", 2)
        patch.set("parallelism.zero_stage", int(stage) if str(stage).isdecimal() else stage)
    offloaded = {key: deepspeed.take(key) for key in ("offload_optimizer_device", "offload_param_device")}
    for key, device in offloaded.items():
        if device is not None:
            set_offload(patch, deepspeed.path(key), device, weights=key == "offload_param_device")
    set_clip(deepspeed)
    accumulated = deepspeed.whole("gradient_accumulation_steps")
    deepspeed.leave_all(
        ("zero3_init_flag", "zero3_save_16bit_model", "offload_optimizer_nvme_path", "offload_param_nvme_path"),
        "ranks read their share of a model, and `export: {format: bf16}` writes 16 bits",
    )
    deepspeed.drop(
        ("deepspeed_multinode_launcher", "deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter")
    )
    deepspeed.leave("deepspeed_moe_layer_cls_names", "experts need no names", matters=False)
    deepspeed.finish("Accelerate's deepspeed_config")
    return accumulated


def _set_megatron(megatron: Section) -> int | None:
    """Set the degrees, clipping and recomputation. Returns the forward passes of a process in a step."""
    patch = megatron.patch
    set_degrees(megatron, {"tp_degree": "tensor", "pp_degree": "pipeline", "context_parallel_size": "context"})
    if megatron.is_on("sequence_parallelism") and patch.get("parallelism.tensor"):
        patch.set("parallelism.sequence", True)
    if megatron.is_on("use_distributed_optimizer"):
        patch.set("parallelism.zero_stage", 1)
    if megatron.is_on("recompute_activations"):
        patch.set("training.activation_checkpointing", "selective")
    set_clip(megatron)
    accumulated = megatron.whole("num_micro_batches")
    megatron.finish("Megatron-LM that a job has a field for")
    return accumulated


def _set_compile(dynamo: Section) -> None:
    backend, mode = dynamo.take("backend"), dynamo.take("mode")
    dynamo.leave_all(("use_fullgraph", "use_dynamic"), "blocks are compiled whole, for shapes that do not change")
    dynamo.drop(("use_regional_compilation",))
    if backend is not None:
        set_compile(dynamo, backend, mode)
    dynamo.finish("Accelerate's dynamo_config")
