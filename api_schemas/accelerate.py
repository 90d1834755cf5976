"""Read the precision of a Hugging Face Accelerate configuration.

`precision_from_accelerate` takes an `fp8_config` block, or a whole `config.yaml`, with every key and spelling that
Accelerate's YAML, command line, environment and keyword arguments use, or DeepSpeed's `msamp` section, and returns the
`PrecisionSpec` that trains the same way. As in Accelerate, keys of a backend other than the chosen one are checked and
then ignored. Unknown keys are errors. `PrecisionSpec.not_applied` names the settings of a whole file that are no precision
(sharding, compilation, engines); `imports/accelerate.py` reads these into the fields of a job.
"""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from octet.api_schemas.levels import LEVELS
from octet.api_schemas.precision import PrecisionSpec, TorchaoSpec
from octet.api_schemas.recipe import GemmName, RecipeSpec

GEMMS: tuple[GemmName, ...] = ("output", "grad_input", "grad_weight")
PASSES = ("override_fprop", "override_dgrad", "override_wgrad")
"""Transformer Engine's names for the three products, as Accelerate's environment variables have them."""

KEYS: dict[str, tuple[str, ...]] = {
    "te": (
        "margin",
        "interval",
        "format",
        "amax_history_len",
        "amax_compute_algo",
        "override_linear_precision",
        *PASSES,
        "use_autocast_during_eval",
        "use_mxfp8_block_scaling",
    ),
    "msamp": ("opt_level", "enabled", "use_te"),
    "ao": ("pad_inner_dim", "enable_fsdp_float8_all_gather"),
}
ALIASES = {
    "amax_history_length": "amax_history_len",
    "amax_compute_algorithm": "amax_compute_algo",
    "optimization_level": "opt_level",
}
_OF_DELAYED_SCALING = {"amax_history_len": "1024", "amax_compute_algo": "most_recent", "interval": "1"}
"""Transformer Engine's options that MXFP8 has no use for, with the defaults that Accelerate fills in."""

BACKENDS = {"ao": "ao", "torchao": "ao", "te": "te", "transformer_engine": "te", "msamp": "msamp", "ms_amp": "msamp"}
LEVEL_OF_MIXED_PRECISION = {"no": "fp32", "fp16": "fp16-amp", "bf16": "bf16-amp"}
_HERE = "precision reads no more than formats; `octet import accelerate` reads all. Set "
NOT_APPLIED = {
    "distributed_type": f"{_HERE}parallelism.zero_stage",
    "num_processes": f"{_HERE}resources.workers",
    "fsdp_config": f"{_HERE}parallelism.zero_stage: 3",
    "deepspeed_config": f"{_HERE}parallelism.zero_stage and training",
    "megatron_lm_config": f"{_HERE}parallelism.tensor, pipeline and sequence",
    "parallelism_config": f"{_HERE}parallelism.tensor and context",
    "dynamo_config": f"{_HERE}training.compile",
    "ipex_config": "jobs compute by torch's own kernels on CPUs",
    "downcast_bf16": "jobs run on GPUs and CPUs",
}
"""Keys of a whole configuration that are no part of a job's `precision`, each with the field that has it, or the reason."""
TOP_LEVEL_KEYS = frozenset(
    {
        *("command_file", "commands", "compute_environment", "debug", "deepspeed_config", "distributed_type"),
        *("downcast_bf16", "dynamo_config", "enable_cpu_affinity", "fp8_config", "fsdp_config", "gpu_ids", "ipex_config"),
        *("machine_rank", "main_process_ip", "main_process_port", "main_training_function", "megatron_lm_config"),
        *("mixed_precision", "mpirun_config", "num_machines", "num_processes", "parallelism_config", "rdzv_backend"),
        *("same_network", "tpu_env", "tpu_name", "tpu_use_cluster", "tpu_use_sudo", "tpu_zone", "use_cpu"),
    }
)


GATHER_NOT_APPLIED = (
    "enable_fsdp_float8_all_gather: it is of torch's FSDP2; a job shards by parallelism.zero_stage 3, and gathers as "
    "parallelism.wide_communication says"
)


def is_accelerate(document: Mapping[str, Any]) -> bool:
    """Return True if a `precision` document uses Accelerate's keys rather than ours."""
    if "level" in document:
        return False
    known = {"fp8_config", "mixed_precision", *_known_keys()}
    return any(_spelling(key) in known for key in document)


def precision_from_accelerate(document: Mapping[str, Any]) -> PrecisionSpec:
    """Read an `fp8_config` block or a whole `config.yaml`. The ValueError names the key to change."""
    if not {"fp8_config", "mixed_precision"} & document.keys():
        return _from_fp8_config(document)
    check_keys(document)
    mode = str(document.get("mixed_precision", "fp8")).lower()
    not_applied = _not_applied(document)
    if mode == "fp8":
        block = document.get("fp8_config") or {}
        if not isinstance(block, Mapping):
            raise ValueError(_not_one_of("fp8_config", block, ("a block of options",)))
        return _from_fp8_config(block, not_applied)
    if mode not in LEVEL_OF_MIXED_PRECISION:
        raise ValueError(_not_one_of("mixed_precision", mode, (*LEVEL_OF_MIXED_PRECISION, "fp8")))
    return PrecisionSpec.model_validate({"level": LEVEL_OF_MIXED_PRECISION[mode], "not_applied": not_applied})


def check_keys(document: Mapping[str, Any]) -> None:
    """Raise ValueError for a key that no whole configuration has."""
    for key in document:
        if key not in TOP_LEVEL_KEYS:
            raise ValueError(_unknown(key, "an Accelerate configuration", TOP_LEVEL_KEYS))


def _not_applied(document: Mapping[str, Any]) -> tuple[str, ...]:
    """List the settings of a whole configuration that would change training but are not applied, one line each."""
    found = []
    for key, why in NOT_APPLIED.items():
        asked = document.get(key)
        if isinstance(asked, Mapping):
            names = [name for name, value in asked.items() if not _says_nothing(value)]
            found += [f"{key}: {', '.join(names)}: {why}"] if names else []
        elif not _says_nothing(asked):
            found.append(f"{key} {asked}: {why}")
    return tuple(found)


def _says_nothing(value: Any) -> bool:
    return not value or str(value).upper() in {"NO", "NONE", "FALSE", "1", "MULTI_GPU", "MULTI_CPU"}


def _from_fp8_config(block: Mapping[str, Any], not_applied: tuple[str, ...] = ()) -> PrecisionSpec:
    precision, more = _precision_of(_in_one_spelling(block))
    return precision.model_copy(update={"not_applied": (*not_applied, *more)})


def _precision_of(options: Mapping[str, Any]) -> tuple[PrecisionSpec, tuple[str, ...]]:
    """Return the precision that one backend's options mean, and the options that are not applied."""
    match _backend(options):
        case "te":
            return PrecisionSpec(level="te", recipe=_te_recipe(options)), ()
        case "msamp":
            return _msamp(options), ()
        case _:
            torchao = TorchaoSpec(pad_inner_dim=_boolean(options, "pad_inner_dim", True))
            precision = PrecisionSpec(level="ao", torchao=torchao, skip_first_layers=1, skip_last_layers=1)
            gathers = _boolean(options, "enable_fsdp_float8_all_gather", False)
            return precision, (GATHER_NOT_APPLIED,) if gathers else ()


def _in_one_spelling(block: Mapping[str, Any]) -> dict[str, Any]:
    """Bring all keys to one spelling: `--fp8_margin`, `ACCELERATE_FP8_MARGIN` and `margin` are the same key."""
    known = _known_keys()
    options: dict[str, Any] = {}
    for written, value in block.items():
        key = _spelling(written)
        if key not in known:
            raise ValueError(_unknown(written, "fp8_config", (*known, *ALIASES)))
        if key in options:
            raise ValueError(f"{written!r} sets {key!r} a second time in fp8_config. Remove one of the two.")
        options[key] = value
    return options


def _known_keys() -> tuple[str, ...]:
    return ("backend", *(key for keys in KEYS.values() for key in keys))


def _spelling(written: object) -> str:
    key = str(written).lower().lstrip("-").replace("-", "_").removeprefix("accelerate_")
    key = key if key == "fp8_config" else key.removeprefix("fp8_")
    return ALIASES.get(key, key)


def _backend(options: Mapping[str, Any]) -> str:
    """Return the named backend; else the only backend that the keys belong to; else torchao, Accelerate's first choice."""
    if options.get("backend") is not None:
        backend = str(options["backend"]).lower().replace("-", "_")
        if backend not in BACKENDS:
            raise ValueError(_not_one_of("backend", options["backend"], ("AO", "TE", "MSAMP")))
        return BACKENDS[backend]
    spoken_of = [backend for backend, keys in KEYS.items() if options.keys() & set(keys)]
    return spoken_of[0] if len(spoken_of) == 1 else "ao"


def _msamp(options: Mapping[str, Any]) -> PrecisionSpec:
    if not _boolean(options, "enabled", True):
        raise ValueError("enabled is false; allowed: true. Remove the msamp section to train without it.")
    # DeepSpeed's section has `enabled`, and MS-AMP's own default; Accelerate's options have another.
    default = "O1" if "enabled" in options else "O2"
    level = str(options.get("opt_level", default)).strip().upper()
    if level not in ("O1", "O2", "O3"):
        hint = f" Did you mean 'O{level[1:]}', with the letter O?" if level in ("01", "02", "03") else ""
        raise ValueError(_not_one_of("opt_level", options["opt_level"], ("O1", "O2", "O3")) + hint)
    recipe = LEVELS["te"].recipe if _boolean(options, "use_te", False) else None
    return PrecisionSpec.model_validate({"level": level, "recipe": recipe})


def _te_recipe(options: Mapping[str, Any]) -> RecipeSpec:
    is_mx = _boolean(options, "use_mxfp8_block_scaling", False)
    for key, default in _OF_DELAYED_SCALING.items() if is_mx else ():
        if str(options.get(key, default)).lower() != default:
            raise ValueError(
                f"{key} is {options[key]!r}; allowed with use_mxfp8_block_scaling: none, since blocks have no history. "
                f"Remove {key}."
            )
    operand_format = str(options.get("format", "HYBRID")).upper()
    if operand_format not in ("HYBRID", "E4M3"):
        advice = " E5M2 keeps 2 bits of mantissa, too few for weights and inputs." if operand_format == "E5M2" else ""
        raise ValueError(_not_one_of("fp8_format", options["format"], ("HYBRID", "E4M3")) + advice)
    algorithm = str(options.get("amax_compute_algo", "most_recent")).lower()
    if algorithm not in ("max", "most_recent"):
        raise ValueError(_not_one_of("amax_compute_algo", options["amax_compute_algo"], ("max", "most_recent")))
    overridden = zip(GEMMS, _three_booleans(options), strict=True)
    every_recipe = {
        "margin": _whole_number(options, "margin", 0, at_least=0),
        "high_precision_gemms": [gemm for gemm, is_overridden in overridden if is_overridden],
        "fp8_in_evaluation": _boolean(options, "use_autocast_during_eval", False),
    }
    if is_mx:  # Accelerate does not pass HYBRID, its default, on, and Transformer Engine's MXFP8 is E4M3
        return RecipeSpec.model_validate({**every_recipe, "granularity": "mx"})
    return RecipeSpec.model_validate(
        {
            **every_recipe,
            "scaling": "delayed",
            "format": operand_format,
            "interval": _whole_number(options, "interval", 1, at_least=1),
            "amax_history_length": _whole_number(options, "amax_history_len", 1024, at_least=1),
            "amax_compute_algorithm": algorithm,
        }
    )


def _three_booleans(options: Mapping[str, Any]) -> list[bool]:
    """Read `override_linear_precision` (a list, `a,b,c` or `(a, b, c)`) or the environment's three separate keys."""
    written = options.get("override_linear_precision")
    if written is None:
        return [_boolean(options, name, False) for name in PASSES]
    parts = written.strip("()[] ").split(",") if isinstance(written, str) else written
    if not isinstance(parts, list | tuple) or len(parts) != len(GEMMS):
        raise ValueError(_not_one_of("override_linear_precision", written, ("three booleans, for fprop, dgrad and wgrad",)))
    return [_boolean({"override_linear_precision": part}, "override_linear_precision", False) for part in parts]


def _boolean(options: Mapping[str, Any], key: str, default: bool) -> bool:
    written = options.get(key, default)
    word = str(written).strip().lower()
    if word not in ("true", "false", "1", "0", "yes", "no"):
        raise ValueError(_not_one_of(key, written, ("true", "false")))
    return word in ("true", "1", "yes")


def _whole_number(options: Mapping[str, Any], key: str, default: int, *, at_least: int) -> int:
    written = str(options.get(key, default)).strip()
    if not written.isdecimal() or int(written) < at_least:
        raise ValueError(_not_one_of(key, options[key], (f"a whole number from {at_least} up",)))
    return int(written)


def _not_one_of(key: str, got: Any, allowed: tuple[str, ...]) -> str:
    return f"{key} is {got!r}; allowed: {', '.join(allowed)}. Change it."


def _unknown(key: object, where: str, known: Collection[str]) -> str:
    close = get_close_matches(str(key).lower(), known, n=1)
    hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(sorted(known))}."
    return f"unknown key {key!r} in {where}. {hint}"
