"""Answers to what people type in place of a job's fields and values: names of other tools, and right names in wrong places.

The tables are read after a validation has failed; a valid job never comes here. A name is compared by its letters and digits
alone, so `batch_size`, `batchSize` and `batch-size` are one row. In a text, {value} is what was given, if it is short.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel

from octet.api_schemas.base import contract_in
from octet.api_schemas.data.files import HUB_ID, NO_HUBS, change_of_relative
from octet.api_schemas.levels import LEVELS
from octet.api_schemas.models import FAMILIES, PRESETS
from octet.api_schemas.union import annotation_of, tagged_members

ALIASES: Mapping[str, str] = {
    "precision.level": "opt_level precision_level mixed_precision amp_level dtype quantization precision.fp8 fp8 use_fp8",
    "precision.exclude": "precision.skip precision.ignore exclude_modules modules_to_not_convert skip_modules",
    "model.preset": "model_name preset_name model.name model.size model.model",
    "model.path": "model_path model_name_or_path pretrained pretrained_model_name_or_path checkpoint_path hf_model "
    "hf_model_id model_id",
    "model.family": "model_type model.type",
    "model.num_layers": "n_layer n_layers num_hidden_layers layers depth",
    "model.num_heads": "n_head n_heads num_attention_heads heads",
    "model.hidden_size": "n_embd d_model hidden_dim embedding_size",
    "data.path": "dataset dataset_path data_path data_dir train_file train_data train_path corpus data.dir data.file data.root",
    "data.source": "data.type data.format data.kind",
    "training.steps": "max_steps num_steps train_steps num_train_steps total_steps iterations max_iters n_steps",
    "training.epochs": "num_epochs num_train_epochs max_epochs n_epochs epoch",
    "training.global_batch_size": "train_batch_size total_batch_size effective_batch_size",
    "training.micro_batch_size": "per_device_train_batch_size per_device_batch_size train_micro_batch_size_per_gpu microbatch",
    "training.sequence_length": "seq_len seq_length max_seq_len max_seq_length block_size context_length n_ctx max_length",
    "training.optimizer.learning_rate": "lr base_lr max_lr peak_lr",
    "training.optimizer.weight_decay": "wd",
    "training.optimizer.eps": "epsilon adam_epsilon",
    "training.optimizer.name": "optim optimizer_name optimizer_type training.optimizer.type",
    "training.schedule.name": "lr_scheduler lr_scheduler_type lr_schedule scheduler training.schedule.type",
    "training.schedule.warmup_steps": "warmup num_warmup_steps warmup_iters",
    "training.gradient_clip": "max_grad_norm grad_clip clip_grad_norm gradient_clipping gradient_clip_val clip_grad clip",
    "training.eval_every": "eval_steps eval_interval evaluate_every val_check_interval  eval_freq",
    "training.checkpoint_every": "save_steps save_every save_interval checkpoint_interval",
    "training.ema_decay": "ema",
    "training.seed": "random_seed manual_seed data_seed",
    "training.compile": "torch_compile",
    "parallelism.zero_stage": "zero zero_optimization stage",
    "parallelism.tensor": "tp tensor_parallel tensor_parallel_size tensor_model_parallel_size tp_size",
    "parallelism.pipeline": "pp pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pp_size",
    "parallelism.context": "cp context_parallel context_parallel_size cp_size",
    "parallelism.expert": "ep expert_parallel expert_parallel_size ep_size expert_model_parallel_size",
    "parallelism.sequence": "sequence_parallel",
    "resources.pool": "queue partition cluster node_pool",
    "precision.recipe.amax_history_length": "amax_history precision.amax_history amax_history_len",
    "adapter.rank": "lora_r lora_rank adapter.r",
    "adapter.alpha": "lora_alpha",
    "adapter.targets": "target_modules lora_target_modules",
    "retry.max_failures": "retries max_retries max_restarts retry.max retry.count",
    "labels": "tags metadata annotations",
    "name": "job_name run_name experiment_name title",
}  # fmt: skip
"""Names that mean one field, by its path. A name with a dot is meant in that place alone, and is looked for first."""

_RANKS = (
    "Set resources.workers: {value}. A worker is one rank, which takes one GPU of a GPU pool; resources.pool names the pool, "
    "and `octet pools` lists them."
)
_POOL = "The pool decides the device: set resources.pool to one that `octet pools` lists."
_ADAPTER = "Set adapter: {rank: 16} to train adapters (LoRA) of the model in model.path."
_FROM_SERVER = "Remove it: the server stores checkpoints and results. `octet download` fetches them."
_KEPT = "Remove it: every step's numbers are kept. `octet metrics` shows them, and the server serves /metrics."
_TRACKERS = (
    "Set trackers: {tensorboard: {}}; mlflow and wandb are others. `octet metrics` shows every step's numbers without one."
)
_NO_SCRIPT = "Jobs run no scripts: model.entrypoint names a function that builds your network (docs/own-models.md)."

INTENTS: Mapping[str, tuple[str, str]] = {
    "batch": (
        "batch_size batch bs",
        "Which is meant? training.global_batch_size: samples of one optimizer step, over all ranks. "
        "training.micro_batch_size: samples of one rank in one forward pass. Set one of them to {value}.",
    ),
    "accumulation": (
        "gradient_accumulation_steps grad_accum accumulate_grad_batches gradient_accumulation accumulation_steps",
        "The number follows from two others: training.global_batch_size / (training.micro_batch_size x data ranks). Set these.",
    ),
    "ranks": (
        "gpus num_gpus n_gpus ngpus gpu_count gpus_per_node nproc_per_node num_processes world_size num_workers ranks "
        "resources.gpu devices accelerators replicas nodes num_nodes",
        _RANKS,
    ),
    "device": ("device accelerator gpu cuda gpu_type cpu", _POOL),
    "bf16": ("bf16 bfloat16", "Set precision.level: bf16-amp."),
    "fp16": ("fp16 float16 half", "Set precision.level: fp16-amp."),
    "amp": ("amp autocast use_amp", "Set precision.level: bf16-amp or fp16-amp."),
    "fp32": ("fp32 float32 tf32", "Set precision.level: fp32."),
    "deepspeed": (
        "deepspeed deepspeed_config",
        "Set parallelism.zero_stage: 1, 2 or 3, which shards as DeepSpeed's stages do; jobs read no DeepSpeed configuration.",
    ),
    "fsdp": (
        "fsdp fsdp_config fully_shard",
        "Set parallelism.zero_stage: 3, which shards weights, gradients and optimizer states as FSDP does.",
    ),
    "ddp": ("ddp distributed strategy", "Remove it: resources.workers above 1 is data parallel; see parallelism for more."),
    "warmup ratio": (
        "warmup_ratio warmup_fraction warmup_epochs",
        "Set training.schedule.warmup_steps, a number of optimizer steps.",
    ),
    "betas": ("beta1 beta2 adam_beta1 adam_beta2", "Set training.optimizer.betas: [0.9, 0.95], both numbers together."),
    "recompute": (
        "gradient_checkpointing activation_checkpoint checkpoint_activations recompute",
        "Set training.activation_checkpointing: full or selective.",
    ),
    "adapters": ("lora peft qlora use_lora", _ADAPTER),
    "places": ("output_dir out_dir save_dir output checkpoint_dir log_dir logging_dir", _FROM_SERVER),
    "trackers": ("wandb report_to tensorboard mlflow trackio tracking tracker logger reporting", _TRACKERS),
    "curves": ("logging_steps log_every log_interval", _KEPT),
    "scripts": ("script command entrypoint image args cmd", _NO_SCRIPT),
    "resume": (
        "resume resume_from_checkpoint resume_from load_from",
        "Remove it: a job goes on from its own newest checkpoint. To start from weights, export them and set model.path.",
    ),
    "early": ("early_stopping patience", "Remove it: a job runs its training.steps or training.epochs; cancel it earlier."),
    "time": ("timeout walltime time_limit max_time hours", "Remove it: a job has no time limit, but training.steps or epochs."),
    "data degree": (
        "dp data_parallel data_parallel_size dp_size parallelism.data",
        "The data parallel degree follows: resources.workers / (tensor x pipeline x context). Set resources.workers.",
    ),
    "task": (
        "task loss criterion objective",
        "Remove it: the task and its loss follow from model.family, and `octet models` lists them.",
    ),
    "environment": (
        "env environment env_vars runtime_env requirements pip",
        "Remove it: jobs run in the environment of the workers, which the operator installs (docs/deploy.md).",
    ),
    "owner": (
        "project user owner namespace tenant team",
        "Remove it: the API key says whose the job is. To group jobs, set labels: {team: {value}}.",
    ),
    "manifest": ("api_version version kind spec job", "Remove it: a job's fields stand at the top of the document."),
    "evaluation": (
        "eval evaluation eval_strategy evaluation_strategy",
        "Set training.eval_every, a number of optimizer steps.",
    ),
    "checkpoint": (
        "checkpoint checkpointing save save_strategy",
        "Set training.checkpoint_every, a number of optimizer steps. To start from weights, set model.path.",
    ),
    "split": (
        "data.split data.subset data.config_name",
        "Remove it: data.evaluation_fraction says how much of the data is held out.",
    ),
    "globs": ("data.glob data.pattern data.files data.data_files", 'Set data.include: ["{value}"], a list of globs.'),
    "loading": ("dataloader dataloader_num_workers data_workers", "Remove it: a rank reads ahead by itself."),
    "save limit": ("save_total_limit keep_last", "Set training.keep.last, the number of newest checkpoints that stay."),
}
"""Names that mean no single field: the names of each intent, and what to change."""

_MAIN_FIELDS: Mapping[str, str] = {
    "data": "path",
    "training": "steps",
    "training.optimizer": "name",
    "training.schedule": "name",
    "resources": "workers",
    "retry": "max_failures",
    "adapter": "rank",
    "parallelism": "zero_stage",
    "model": "preset",
}
"""The field that is meant by a bare value in place of a part."""
_TEXT_FIELDS = ("path", "name", "level", "preset")

_EXAMPLES: Mapping[str, str] = {
    "name": "name: first",
    "model": "model: gpt-tiny",
    "data": "data: {path: /data/corpus}",
    "training": "training: {steps: 200}",
}
"""A required part of a job as one writes it."""

_PATTERNS: Mapping[str, str] = {
    "name": "letters, digits, '.', '_' and '-', beginning with a letter or digit, at most 100",
    "resources.pool": "small letters, digits and '-', beginning with a letter, at most 32",
    "labels": "labels of small letters, digits, '.', '/' and '-', with printable values",
    "model.entrypoint": "package.module:function",
}
"""The meaning of a regular expression, by the field of a job that has to match it."""
_PATTERNS_OF_QUERIES: Mapping[str, str] = {"label": "key:value, such as team:research; on the command line key=value too"}

_LONGEST_VALUE = 40


def _levels_words() -> str:
    rows = [row for row in LEVELS.values() if row.gemm == "fp8"]
    return " ".join(f"{row.name}: {row.description}" for row in rows)


_FP8 = "FP8 is a choice of levels, which differ in what they store. {levels} Change {path}, to O2 if you have no other wish."
_NEVER = "Set {path}: 0, which means only after the last step."
_SMALLEST = {
    name: min(family.presets, key=lambda preset: family.presets[preset].num_parameters or 0)
    for name, family in FAMILIES.items()
    if family.presets
}
VALUES: Mapping[str, Mapping[str, str]] = {
    "level": {
        "fp8 float8 8 8bit mxfp8 e4m3 hybrid fp8hybrid fp8e4m3 fp8delayed delayed true": _FP8,
        "bf16 bfloat16 mixed amp": "Did you mean 'bf16-amp'? Change {path}.",
        "fp16 float16 half": "Did you mean 'fp16-amp'? Change {path}.",
        "float32 full none tf32 o0 00": "Did you mean 'fp32'? Change {path}.",
        "transformerengine nvte": "Did you mean 'te'? Change {path}.",
        "torchao tensorwise rowwise rowwisewithgwhp": "Did you mean 'ao'? Change {path}.",
        "msamp": "MS-AMP's levels have their names here: O1, O2 and O3. Change {path}.",
        "int8 int4 fp4 nvfp4 mxfp4 4bit": "No level computes in that format; FP8 is the smallest. Change {path}.",
    },
    "model.preset": {
        family: f"That is a family. Its smallest preset is {preset!r}. Change {{path}}." for family, preset in _SMALLEST.items()
    },
    "precision": {"none": "Remove it for fp32, or name a level: precision: O2."},
    "precision.recipe": {
        "delayed": "Write {path}: {{scaling: delayed}}.",
        "current dynamic": "Write {path}: {{scaling: current}}.",
        "tensor tensorwise": "Write {path}: {{granularity: tensor}}.",
        "row rowwise": "Write {path}: {{granularity: row}}.",
        "block blockwise": "Write {path}: {{granularity: block}}.",
        "mx mxfp8": "Write {path}: {{granularity: mx}}.",
    },
    "priority": {
        "high urgent": "Set {path}: 75; 100 is the highest.",
        "normal medium default": "Set {path}: 50, the default.",
        "low idle": "Set {path}: 25; 0 is the lowest.",
    },
    "training.optimizer.name": {
        "adamwtorch adamwtorchfused adamwhf fusedadam": "Did you mean 'adamw'? Change {path}.",
        "adamw8bit adam8bit pagedadamw8bit": "Set {path}: adamw and precision.level: O2-8bit, which has moments in 8 bits.",
    },
    "training.schedule.name": {"wsd": "Did you mean 'warmup_stable_decay'? Change {path}."},
    "data.source": {
        "hf huggingface hub arrow parquet": "Did you mean 'datasets', a folder that save_to_disk wrote? Change {path}.",
        "json": "Did you mean 'jsonl'? Change {path}.",
        "txt": "Did you mean 'text'? Change {path}.",
        "npz image": "Did you mean 'images'? Change {path}.",
    },
    "training.compile": {"true": "Did you mean 'on'? Change {path}.", "false": "Did you mean 'off'? Change {path}."},
    "training.activation_checkpointing": {
        "true": "Did you mean 'full'? Change {path}.",
        "false": "Did you mean 'none'? Change {path}.",
    },
    "training.eval_every": {"none off never false": _NEVER},
    "training.checkpoint_every": {"none off never false": _NEVER},
    "training.gradient_clip": {"0": "To clip nothing, set {path}: null."},
}
"""Values that mean another one, by the path of the field or its last part: what to change."""


def advice_for_name(path: list[str], value: object, root: type[BaseModel]) -> str | None:
    """Return what to change for an unknown field of a job; None if nothing like it is a field anywhere."""
    below = ".".join(path)
    return _advice_of(below, value) or _advice_of(path[-1], value) or _other_place(below, path[-1], value, root)


def advice_for_value(path: list[str], value: object) -> str | None:
    """Return what to change for a value that names something else; None if the tables do not have it."""
    at = ".".join(path)
    texts = VALUES.get(at) or VALUES.get(path[-1] if path else "") or {}
    for values, text in texts.items():
        if _letters(str(value)) in values.split():
            return text.format(path=at, levels=_levels_words())
    return None


def advice_for_part(path: list[str], value: object) -> str | None:
    """Return what to write in place of a bare value of a part that has fields."""
    at = ".".join(path)
    if advice := advice_for_value(path, value):
        return advice
    if at not in _MAIN_FIELDS or isinstance(value, list | dict):
        return None
    if at == "data" and isinstance(value, str) and not value.startswith("/") and "://" not in value:
        return change_of_relative("data.path", value)
    field = _MAIN_FIELDS[at]
    fits = isinstance(value, str) if field in _TEXT_FIELDS else isinstance(value, int | float) and not isinstance(value, bool)
    return f"Write {at}: {{{field}: {_short(value) if fits else '…'}}}."


def advice_for_model(preset: str) -> str:
    """Return what to change for a model that is the preset of no family."""
    if preset.startswith(("/", "~", "./", "../")):
        return "A saved model is named by its folder: set model: {path: /absolute/folder}."
    if HUB_ID.fullmatch(preset):
        return f"{NO_HUBS} Download it below a data root, and set model: {{path: /absolute/folder}}."
    return "A network of transformers is model: {architecture: …, config: …}; a saved one is model: {path: /absolute/folder}."


def words_of_type(kind: str, path: list[str], value: object) -> tuple[str, str | None]:
    """Return what a field takes and what to write, for pydantic's name of a wrong type; two empty answers for other errors."""
    at = ".".join(path)
    match kind:
        case "tuple_type" | "list_type":
            return "a list", f'Write {at}: ["{_short(value)}"].' if isinstance(value, str | int | float) else None
        case "dict_type":
            return "a mapping of names and values", "Write labels: {team: research}." if at == "labels" else None
        case "string_type":
            is_number = isinstance(value, int | float)
            return "text", f'Write {at}: "{_short(value)}", with the quotes.' if is_number else None
        case "int_parsing" | "int_type" | "int_from_float":
            return "an integer", None
        case "float_parsing" | "float_type":
            return "a number", None
        case "bool_parsing" | "bool_type":
            return "true or false", None
    return "", None


def presets() -> list[str]:
    """Return the names of the presets of all families."""
    return sorted(PRESETS)


def example_of(path: list[str]) -> str:
    """Return what to write for a required part that is missing; empty if there is no example."""
    example = _EXAMPLES.get(".".join(path))
    return f" Such as: {example}" if example else ""


def words_of_pattern(path: list[str], is_job: bool) -> str | None:
    """Return what the regular expression of a field means; None for one that is shown by itself. is_job: not of a query."""
    words = _PATTERNS if is_job else _PATTERNS_OF_QUERIES
    return words.get(".".join(path)) or words.get(path[0] if path else "")


def _advice_of(name: str, value: object) -> str | None:
    aliases, intents = _names()
    if path := aliases.get(_folded(name)):
        return _setting(path, value)
    advice = intents.get(_folded(name))
    return advice.replace("{value}", _short(value)) if advice else None


def _setting(path: str, value: object) -> str:
    """Return the advice to set a field to a value, or to what the value means there."""
    return advice_for_value(path.split("."), value) or f"Set {path}: {_short(value)}."


def _other_place(path: str, name: str, value: object, root: type[BaseModel]) -> str | None:
    """Return the advice for a field that exists elsewhere in a job, or in another member of the same union."""
    places = _places(root).get(_letters(name), {})
    for place in places:
        if place != path and _folded(place) == _folded(path):
            return f"Did you mean {place.rpartition('.')[2]!r}? {_setting(place, value)}"
    if path in places:
        members = " and ".join(f"'{member}'" for member in dict.fromkeys(places[path]))
        return f"It is a field of {members}: set that too, or remove it."
    if len(places) == 1:
        return f"It lies in another place. {_setting(next(iter(places)), value)}"
    return f"Which is meant? Fields of that name: {', '.join(places)}. Set one of them." if places else None


@cache
def _names() -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return the path of each alias and the advice of each intent, by the letters and digits of the name."""
    aliases = {_folded(name): path for path, names in ALIASES.items() for name in names.split()}
    return aliases, {_folded(name): advice for names, advice in INTENTS.values() for name in names.split()}


@cache
def _places(root: type[BaseModel]) -> Mapping[str, Mapping[str, list[str]]]:
    """Return where each field of a document is, by the letters of its last part: paths, each with the members that have it."""
    found: dict[str, dict[str, list[str]]] = {}
    for path, member in _fields_below(root, "", ""):
        found.setdefault(_letters(path.rpartition(".")[2]), {}).setdefault(path, []).append(member)
    return found


def _fields_below(model: type[BaseModel], prefix: str, member: str) -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        path, annotation = f"{prefix}{name}", annotation_of(field)
        yield path, member
        tag_of, members = tagged_members(annotation)
        for tag, contract in members.items():
            assert tag_of is not None
            yield from _fields_below(contract, f"{path}.", f"{path}.{tag_of.field}: {tag}")
        if tag_of is None and (part := contract_in(annotation)) is not None:
            yield from _fields_below(part, f"{path}.", "")


def _short(value: object) -> str:
    """Write a plain value as a job file has it; others as an ellipsis."""
    plain: Any = {True: "true", False: "false"}.get(value) if isinstance(value, bool) else value
    text = str(plain) if isinstance(plain, str | int | float) else "…"
    return text if 0 < len(text) <= _LONGEST_VALUE else "…"


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def _folded(path: str) -> str:
    return ".".join(map(_letters, path.split(".")))
