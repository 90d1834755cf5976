"""Read a torchtitan TOML as a part of a job.

Settings and defaults are those of torchtitan's job_config.py of October 2025. Later versions are configured in Python, and have
no file to read.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

from octet.api_schemas.imports.accelerate import written_precision
from octet.api_schemas.imports.patch import NOTHING, Batch, Given, Patch, Section, set_batch
from octet.api_schemas.imports.shared import NO_OFFLOAD, set_compile, set_degrees, set_optimizer
from octet.api_schemas.precision import TORCHAO_RECIPES, PrecisionSpec
from octet.api_schemas.recipe import RecipeSpec

_KEPT_FOR_EVERY_JOB = ("job", "profiling", "metrics", "comm", "memory_estimation")
_DEGREES = {
    "tensor_parallel_degree": "tensor",
    "pipeline_parallel_degree": "pipeline",
    "context_parallel_degree": "context",
}
_SCHEDULES = {"1f1b": "1f1b", "interleaved1f1b": "interleaved"}


def from_torchtitan(document: Mapping[str, Any], given: Given = NOTHING) -> Patch:
    """Read the file of `--job.config_file`.

    given: the number of processes, for a file whose data_parallel_shard_degree is -1; others in the place of the file's.
    Raises ValueError, with the setting to change, for what torchtitan would not take either.
    """
    patch = Patch()
    config = Section(document, patch)
    _set_ranks(config.section("parallelism"), given)
    _set_training(config.section("training"), config.section("validation"), given)
    _set_optimization(config.section("optimizer"), config.section("lr_scheduler"))
    _set_checkpointing(config.section("checkpoint"), config.section("activation_checkpoint"))
    compiled = config.section("compile")
    backend = compiled.take("backend")
    if compiled.is_on("enable"):
        if patch.get("parallelism.sequence"):
            reason = "blocks are not compiled where ranks divide the tokens of norms (parallelism.sequence)"
            patch.leave("compile.enable", "true", reason, matters=False)
        else:
            set_compile(compiled, backend, None)
    compiled.drop(("components",))
    compiled.finish("torchtitan's compile")
    _set_precision(config.section("model"), config.section("quantize"))
    debug = config.section("debug")
    debug.copy("seed", "training.seed")
    if debug.is_on("deterministic"):
        patch.set("training.deterministic", True)
    debug.drop(("deterministic_warn_only",))
    debug.finish("torchtitan's debug")
    for part in ("fault_tolerance", "experimental"):
        config.leave(part, "a job has no counterpart", matters=True)
    config.drop(_KEPT_FOR_EVERY_JOB)
    config.finish("torchtitan")
    return patch


def _set_ranks(parallelism: Section, given: Given) -> None:
    """Set the degrees, the ranks and what they shard."""
    patch = parallelism.patch
    set_degrees(parallelism, _DEGREES)
    degrees = {field: patch.get(f"parallelism.{field}") or 1 for field in _DEGREES.values()}
    if degrees["tensor"] > 1:
        # torchtitan divides the tokens of norms, too, wherever it divides layers.
        patch.set("parallelism.sequence", True)
    copies = parallelism.whole("data_parallel_replicate_degree") or 1
    shards = int(parallelism.number("data_parallel_shard_degree", -1))
    ranks = None if shards == -1 else copies * shards * prod(degrees.values())
    if None not in (ranks, given.workers) and ranks != given.workers:
        raise ValueError(
            f"--workers is {given.workers}; allowed: {ranks}, the product of the degrees in parallelism. Leave it out."
        )
    if (workers := ranks or given.workers) is not None:
        patch.set("resources.workers", workers)
    if copies > 1 and shards != 1:
        reason = "all ranks that read samples shard together, across nodes too"
        patch.leave(parallelism.path("data_parallel_replicate_degree"), copies, reason, matters=False)
    reshards = str(parallelism.take_raw("fsdp_reshard_after_forward", "default"))
    if shards != 1 and degrees["pipeline"] > 1:
        patch.set("parallelism.zero_stage", 1)
        reason = "ranks of a pipeline shard the optimizer's states alone"
        patch.leave(parallelism.path("data_parallel_shard_degree"), shards, reason, matters=True)
    elif shards != 1:
        patch.set("parallelism.zero_stage", 2 if reshards == "never" else 3)
    _set_pipeline(parallelism, is_on=degrees["pipeline"] > 1)
    parallelism.drop(("disable_loss_parallel", "enable_async_tensor_parallel", "context_parallel_rotate_method"))
    for key in ("expert_parallel_degree", "expert_tensor_parallel_degree"):
        degree = parallelism.whole(key) or 1
        if degree > 1:
            reason = "experts lie on every rank; parallelism.expert divides them, at te and O1 to O3 and at zero_stage 0 or 1"
            patch.leave(parallelism.path(key), degree, reason, matters=True)
    parallelism.finish("torchtitan's parallelism")


def _set_pipeline(parallelism: Section, *, is_on: bool) -> None:
    """Set the order in which a pipeline's ranks compute, and the samples of one of its passes."""
    patch = parallelism.patch
    schedule = str(parallelism.take_raw("pipeline_parallel_schedule", "1F1B"))
    if is_on and (ours := _SCHEDULES.get(schedule.lower())) is not None:
        patch.set("parallelism.schedule", ours)
    elif is_on:
        reason = "the schedules of a pipeline are 1f1b and interleaved, which compute the same"
        patch.leave(parallelism.path("pipeline_parallel_schedule"), schedule, reason, matters=False)
    tuning = ("first_stage_less_layers", "last_stage_less_layers", "layers_per_stage", "schedule_csv")
    parallelism.leave_all([f"pipeline_parallel_{key}" for key in tuning], "blocks are divided evenly among the ranks")
    parallelism.leave("module_fqns_per_model_part", "blocks are divided evenly among the ranks", matters=False)
    in_pipeline = parallelism.whole("pipeline_parallel_microbatch_size") or 1
    if is_on:
        patch.set("training.micro_batch_size", in_pipeline)


def _set_training(training: Section, validation: Section, given: Given) -> None:
    """Set length, batch and clipping."""
    patch = training.patch
    steps = training.take_raw("steps", 10_000)
    patch.set("training.steps", given.steps or steps)
    patch.set("training.sequence_length", training.take_raw("seq_len", 2048))
    patch.set("training.gradient_clip", training.take_raw("max_norm", 1.0) or None)
    names = ("training.local_batch_size", "accumulation", "training.global_batch_size")
    own, asked = training.whole("local_batch_size") or 8, int(training.number("global_batch_size", -1))
    own = given.batch_size or own
    in_pipeline = patch.get("training.micro_batch_size")
    ranks = patch.num_data_ranks
    if asked != -1 and ranks is not None and asked % (own * ranks):
        raise ValueError(
            f"training.global_batch_size is {asked}; allowed: a multiple of local_batch_size {own} · {ranks} ranks that read "
            "samples. Change one of them."
        )
    set_batch(patch, Batch(own, None, None if asked == -1 else asked, names))
    if in_pipeline is not None:
        patch.set("training.micro_batch_size", in_pipeline)
    if training.is_on("enable_cpu_offload"):
        patch.leave("training.enable_cpu_offload", "true", NO_OFFLOAD, matters=True)
    dtype = training.take_raw("dtype", "float32")
    if dtype != "float32":
        reason = "what lasts is stored as precision.level says: a level of O1 to O3 stores less"
        patch.leave("training.dtype", dtype, reason, matters=True)
    half = training.take_raw("mixed_precision_param", "bfloat16")
    patch.set("precision.level", "bf16-amp" if half == "bfloat16" else "fp32")
    training.drop(("mixed_precision_reduce", "gc_freq", "gc_debug"))
    data = {key: training.take(key) for key in ("dataset", "dataset_path")}
    for key, value in data.items():
        if value is not None:
            patch.leave(f"training.{key}", value, "give --data, a folder of texts or tokens", matters=False)
    training.finish("torchtitan's training")
    if validation.is_on("enable"):
        patch.set("training.eval_every", validation.take_raw("freq", 10))
        batches = validation.number("steps", -1)
        if batches > 0:
            patch.set("training.eval_batches", batches)
    validation.drop(("freq", "steps", "dataset", "dataset_path", "local_batch_size", "seq_len", "enable"))
    validation.finish("torchtitan's validation")


def _set_optimization(optimizer: Section, schedule: Section) -> None:
    patch = optimizer.patch
    set_optimizer(patch, "optimizer.name", optimizer.take_raw("name", "AdamW"))
    for key, field, default in (("lr", "learning_rate", 8e-4), ("eps", "eps", 1e-8), ("weight_decay", "weight_decay", 0.1)):
        patch.set(f"training.optimizer.{field}", optimizer.take_raw(key, default))
    patch.set("training.optimizer.betas", [optimizer.take_raw("beta1", 0.9), optimizer.take_raw("beta2", 0.95)])
    if optimizer.is_on("early_step_in_backward"):
        patch.set("training.gradient_release", True)
    optimizer.drop(("implementation",))
    optimizer.finish("torchtitan's optimizer")
    patch.set("training.schedule.warmup_steps", schedule.take_raw("warmup_steps", 200))
    ratio = schedule.number("decay_ratio", 1.0) if "decay_ratio" in schedule else None
    shape = str(schedule.take_raw("decay_type", "linear"))
    name = {"linear": "linear", "cosine": "cosine"}.get(shape)
    if ratio is not None and ratio < 1:
        name = "warmup_stable_decay" if shape == "linear" else None
    low = schedule.take_raw("min_lr_factor", 0.0)
    if name is None:
        said = shape if ratio is None else f"{shape} over {ratio:g} of the steps"
        reason = "jobs go down in a line over some of the steps, in a line or a cosine over all: set training.schedule"
        patch.leave("lr_scheduler.decay_type", said, reason, matters=True)
    elif ratio == 0:
        patch.set("training.schedule.name", "constant")
    else:
        patch.set("training.schedule.name", name)
        patch.set("training.schedule.final_fraction", low)
        if name == "warmup_stable_decay":
            patch.set("training.schedule.decay_fraction", ratio)
    schedule.finish("torchtitan's lr_scheduler")


def _set_checkpointing(checkpoint: Section, recomputed: Section) -> None:
    """Set how often a job saves, and what it computes again."""
    patch = checkpoint.patch
    if checkpoint.is_on("enable"):
        patch.set("training.checkpoint_every", checkpoint.take_raw("interval", 500))
        kept = checkpoint.take_raw("keep_latest_k", 10)
        if kept:
            patch.set("training.keep.last", kept)
    reason = "a job starts from the folder in model.path"
    checkpoint.leave("initial_load_path", reason, matters=True)
    checkpoint.drop(checkpoint.keys)
    mode = str(recomputed.take_raw("mode", "selective"))
    option = str(recomputed.take_raw("selective_ac_option", "2"))
    if mode in ("none", "full", "selective"):
        patch.set("training.activation_checkpointing", mode)
        if mode == "selective" and option != "op":
            reason = "selective computes all but products and attention again, in every block"
            patch.leave(recomputed.path("selective_ac_option"), option, reason, matters=True)
    else:
        reason = "jobs compute again none, selective or full: set training.activation_checkpointing"
        patch.leave(recomputed.path("mode"), mode, reason, matters=True)
    recomputed.drop(recomputed.keys)


def _set_precision(model: Section, quantize: Section) -> None:
    """Set the level that the converters of a model mean, and name the model."""
    patch = model.patch
    converters = model.names("converters")
    linear = quantize.section("linear")
    float8, mx = linear.section("float8"), linear.section("mx")
    if "float8" in converters or "quantize.linear.float8" in converters:
        _set_float8(float8)
    elif "mx" in converters or "quantize.linear.mx" in converters:
        filters = mx.names("filter_fqns", ["output"])
        patch.job["precision"] = {"level": "te", "recipe": {"granularity": "mx"}, "exclude": [f"*{name}*" for name in filters]}
    known = ("float8", "mx", "quantize.linear.float8", "quantize.linear.mx")
    for converter in converters:
        if converter not in known:
            reason = "the linear layers of a job are converted by precision.level alone"
            patch.leave("model.converters", converter, reason, matters=True)
    named = " ".join(str(value) for key in ("name", "flavor") if (value := model.take(key)) is not None)
    if named:
        patch.leave("model.name", named, "give --model: a preset, or the folder of a saved model", matters=False)
    model.drop(("hf_assets_path", "tokenizer_path", "print_after_conversion"))
    model.finish("torchtitan's model")


def _set_float8(float8: Section) -> None:
    """Set torchao's recipe; at te, which computes the same, where ranks divide layers or tokens."""
    patch = float8.patch
    name = str(float8.take("recipe_name") or "tensorwise")
    if name not in TORCHAO_RECIPES:
        raise ValueError(f"{float8.path('recipe_name')} is {name!r}; allowed: {', '.join(TORCHAO_RECIPES)}. Change it.")
    divides = any(patch.get(f"parallelism.{field}") for field in _DEGREES.values())
    filters = float8.names("filter_fqns")
    recipe: RecipeSpec = TORCHAO_RECIPES[name]
    options: dict[str, Any] = {"level": "te" if divides else "ao", "recipe": recipe.model_dump()}
    options["exclude"] = [f"*{fqn}*" for fqn in filters if fqn != "auto_filter_small_kn"]
    patch.job["precision"] = written_precision(PrecisionSpec.model_validate(options))
    if divides:
        reason = "level te has torchao's recipe in layers that ranks can divide"
        patch.leave("model.converters", "float8", reason, matters=False)
    reason = "it is of torch's FSDP2; a job gathers as parallelism.wide_communication says"
    float8.leave_all(("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp"), reason)
    if "auto_filter_small_kn" in filters:
        reason = (
            "level ao converts small layers too; levels te and O1 to O3 leave out what gains nothing (precision.auto_filter)"
        )
        patch.leave("filter_fqns", "auto_filter_small_kn", reason, matters=False)
    float8.leave("emulate", "CPUs compute FP8 products by a reference", matters=False)
    float8.finish("torchtitan's float8")
