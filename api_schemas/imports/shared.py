"""The settings that several projects share: FSDP's, names of optimizers and schedules, compilation, and checkpointing."""

from collections.abc import Mapping
from math import ceil
from typing import Any, get_args

from octet.api_schemas.imports.patch import Patch, Section
from octet.api_schemas.optimization import OptimizerName

STAGE_OF_STRATEGY = {
    **dict.fromkeys(("full_shard", "1", "true", "hybrid_shard", "4"), 3),
    **dict.fromkeys(("shard_grad_op", "2", "false", "hybrid_shard_zero2", "5"), 2),
    **dict.fromkeys(("no_shard", "3"), 0),
}
"""ZeRO's stage of each sharding strategy of FSDP, by name or number; of FSDP2's reshard_after_forward, true and false."""
HYBRID = ("hybrid_shard", "4", "hybrid_shard_zero2", "5")

OF_FSDP_ALONE = (
    *("auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", "backward_prefetch", "forward_prefetch"),
    *("use_orig_params", "sync_module_states", "cpu_ram_efficient_loading", "state_dict_type", "final_state_dict_type"),
    *("limit_all_gathers", "mixed_precision_policy", "cpu_offload_pin_memory", "ignored_modules", "ignored_params"),
)

NO_OFFLOAD = (
    "ranks keep their shards on the device; training.offload_optimizer moves the states of ranks that shard nothing "
    "(parallelism.zero_stage 0)"
)
WEIGHTS_STAY = "weights stay on the device; training.offload_optimizer is set, which moves the optimizer's states"

OPTIMIZERS: Mapping[str, tuple[str, str | None]] = {
    **dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), ("adamw", None)),
    **dict.fromkeys(("adam", "adam_torch"), ("adam", None)),
    **dict.fromkeys(("lion", "lion_32bit"), ("lion", None)),
    "sgd": ("sgd", None),
    **dict.fromkeys(
        ("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "paged_adamw_8bit", "adamw_ao_8bit"),
        ("adamw", "moments in 8 bits are a part of the level: set precision.level to O2-8bit or O3-split-8bit"),
    ),
    **dict.fromkeys(
        ("paged_adamw", "paged_adamw_32bit"),
        ("adamw", "states are not paged: set training.offload_optimizer to keep them in host memory"),
    ),
    **dict.fromkeys(
        ("lion_8bit", "paged_lion_8bit"), ("lion", "a moment in 8 bits is a part of the level: set precision.level to O2")
    ),
}
"""The optimizer that a name of another project means, and the reason for which it means more than that."""


def set_degrees(section: Section, fields: Mapping[str, str]) -> None:
    """Set the degrees above 1. fields: the degree of a job, by the setting."""
    for key, field in fields.items():
        degree = section.whole(key) or 1
        if degree > 1:
            section.patch.set(f"parallelism.{field}", degree)


def set_clip(section: Section) -> None:
    """Set the norm that gradients are clipped to; 0 means none."""
    clip = section.take_raw("gradient_clipping")
    if clip is not None:
        section.patch.set("training.gradient_clip", None if clip == 0 else clip)


def set_sharding(section: Section, *, default_version: int) -> None:
    """Set ZeRO's stage, checkpointing and offload from FSDP's settings."""
    patch = section.patch
    version = section.whole("version") or default_version
    asked = [value for key in ("sharding_strategy", "reshard_after_forward") if (value := section.take_raw(key)) is not None]
    # FSDP2 has no strategy; files that went over to it still carry one.
    strategy = str(asked[-1] if version == 2 and asked else asked[0] if asked else "full_shard").lower()
    if strategy not in STAGE_OF_STRATEGY:
        allowed = "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, true, false"
        raise ValueError(f"{section.path('sharding_strategy')} is {strategy!r}; allowed: {allowed}. Change it.")
    patch.set("parallelism.zero_stage", STAGE_OF_STRATEGY[strategy])
    if strategy in HYBRID:
        reason = "all ranks that read samples shard together, across nodes too"
        patch.leave(section.path("sharding_strategy"), strategy, reason, matters=False)
    if section.is_on("activation_checkpointing"):
        patch.set("training.activation_checkpointing", "full")
    if section.is_on("offload_params"):
        set_offload(patch, section.path("offload_params"), "true", weights=True)
    section.leave_all(OF_FSDP_ALONE, "ranks shard each block, load and write checkpoints without it")


def set_offload(patch: Patch, setting: str, value: Any, *, weights: bool) -> None:
    """Keep the optimizer's states in host memory where one rank trains; leave over what a job does not move."""
    if patch.get("resources.workers") == 1:
        patch.set("training.offload_optimizer", True)
        patch.set("parallelism.zero_stage", 0)
        if weights:
            patch.leave(setting, value, WEIGHTS_STAY, matters=True)
    else:
        patch.leave(setting, value, NO_OFFLOAD, matters=True)


def set_optimizer(patch: Patch, setting: str, name: Any) -> None:
    """Set the optimizer by another project's name for it."""
    ours, reason = OPTIMIZERS.get(str(name).lower(), (None, None))
    if ours is None:
        reason = f"jobs have the optimizers {', '.join(get_args(OptimizerName))}: set training.optimizer"
    else:
        patch.set("training.optimizer.name", ours)
    if reason is not None:
        patch.leave(setting, name, reason, matters=True)


def set_warmup(patch: Patch, setting: str, value: Any, num_steps: int | None) -> None:
    """Set the steps of the warm-up from a number of steps, or from a share of all steps below 1."""
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{setting} is {value!r}; allowed: a number of steps, or a share of all steps below 1. Change it.")
    if value >= 1 or value == 0:
        patch.set("training.schedule.warmup_steps", int(value))
    elif num_steps is not None:
        patch.set("training.schedule.warmup_steps", ceil(value * num_steps))
    else:
        reason = "the number of steps is known with the data alone: give --steps, or set training.schedule.warmup_steps"
        patch.leave(setting, value, reason, matters=True)


def set_compile(section: Section, backend: Any, mode: Any) -> None:
    """Compile blocks, where the file asks for a backend that compiles."""
    patch = section.patch
    patch.set("training.compile", "on")
    if str(backend or "inductor").lower() != "inductor":
        patch.leave(section.path("backend"), backend, "blocks are compiled by torch's inductor", matters=False)
    if str(mode or "default").lower() != "default":
        patch.leave(section.path("mode"), mode, "blocks are compiled in inductor's default mode", matters=False)
