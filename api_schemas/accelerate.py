"""Read the FP8 part of a Hugging Face Accelerate configuration as a precision of ours.

`precision_from_accelerate` takes an `fp8_config` block or a whole `config.yaml`, with every key and spelling that Accelerate's
YAML, command line, environment and keyword arguments use, and returns the `PrecisionSpec` that trains the same way.
As in Accelerate, valid keys of another backend than the chosen one are ignored. Unknown keys are errors.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from api_schemas.precision import PrecisionSpec, TorchaoSpec
from api_schemas.recipe import GemmName, RecipeSpec

GEMMS: tuple[GemmName, ...] = ("output", "grad_input", "grad_weight")  # fprop, dgrad, wgrad

_KEYS: dict[str, frozenset[str]] = {
    "any": frozenset({"backend"}),
    "te": frozenset(
        {
            "margin",
            "interval",
            "format",
            "amax_history_len",
            "amax_compute_algo",
            "override_linear_precision",
            "override_fprop",
            "override_dgrad",
            "override_wgrad",
            "use_autocast_during_eval",
            "use_mxfp8_block_scaling",
        }
    ),
    "msamp": frozenset({"opt_level"}),
    "ao": frozenset({"pad_inner_dim", "enable_fsdp_float8_all_gather"}),
}
_ALIASES = {
    "amax_history_length": "amax_history_len",
    "amax_compute_algorithm": "amax_compute_algo",
    "optimization_level": "opt_level",
}
_BACKENDS = {"ao": "ao", "torchao": "ao", "te": "te", "transformer_engine": "te", "msamp": "msamp", "ms_amp": "msamp"}
_LEVEL_OF_MIXED_PRECISION = {"no": "fp32", "fp16": "fp16-amp", "bf16": "bf16-amp"}
_TRUE, _FALSE = {"true", "1", "yes", "on"}, {"false", "0", "no", "off"}


def is_accelerate(document: Mapping[str, Any]) -> bool:
    """Whether a `precision` is written in Accelerate's words rather than in ours."""
    known = {"fp8_config", "mixed_precision"}.union(*_KEYS.values())
    return "level" not in document and any(_spelling(key) in known for key in document)


def precision_from_accelerate(document: Mapping[str, Any]) -> PrecisionSpec:
    """The precision of an `fp8_config` block, or of a whole Accelerate `config.yaml`. ValueError says which key to change."""
    if "fp8_config" not in document and "mixed_precision" not in document:
        return _from_fp8_config(document)
    mixed_precision = str(document.get("mixed_precision", "fp8")).lower()
    if mixed_precision in _LEVEL_OF_MIXED_PRECISION:
        return PrecisionSpec.model_validate({"level": _LEVEL_OF_MIXED_PRECISION[mixed_precision]})
    if mixed_precision != "fp8":
        raise ValueError(_one_of("mixed_precision", mixed_precision, (*_LEVEL_OF_MIXED_PRECISION, "fp8")))
    return _from_fp8_config(document.get("fp8_config") or {})


def _from_fp8_config(block: Mapping[str, Any]) -> PrecisionSpec:
    options = _canonical(block)
    match _backend(options):
        case "te":
            return PrecisionSpec(level="te", recipe=_te_recipe(options))
        case "msamp":
            return PrecisionSpec.model_validate({"level": _opt_level(options.get("opt_level", "O2"))})
        case _:
            return PrecisionSpec(
                level="ao",
                torchao=TorchaoSpec(
                    pad_inner_dim=_boolean(options, "pad_inner_dim", True),
                    fsdp_float8_all_gather=_boolean(options, "enable_fsdp_float8_all_gather", True),
                ),
            )


def _canonical(block: Mapping[str, Any]) -> dict[str, Any]:
    """Keys in one spelling: `--fp8_margin`, `ACCELERATE_FP8_MARGIN` and `margin` are the same."""
    known = sorted(frozenset[str]().union(*_KEYS.values()))
    options: dict[str, Any] = {}
    for written, value in block.items():
        key = _spelling(written)
        if key not in known:
            close = get_close_matches(key, known, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."
            raise ValueError(f"unknown key {written!r} in fp8_config. {hint}")
        if key in options:
            raise ValueError(f"{written!r} sets {key!r} a second time in fp8_config. Remove one of the two.")
        options[key] = value
    return options


def _spelling(written: object) -> str:
    key = str(written).lower().lstrip("-").replace("-", "_").removeprefix("accelerate_")
    key = key if key == "fp8_config" else key.removeprefix("fp8_")
    return _ALIASES.get(key, key)


def _backend(options: Mapping[str, Any]) -> str:
    """The backend asked for; else the only one that the keys belong to; else Accelerate's first choice, torchao."""
    if options.get("backend") is not None:
        backend = str(options["backend"]).lower().replace("-", "_")
        if backend not in _BACKENDS:
            raise ValueError(_one_of("backend", options["backend"], ("AO", "TE", "MSAMP")))
        return _BACKENDS[backend]
    spoken_of = [name for name in ("te", "msamp", "ao") if _KEYS[name] & options.keys()]
    return spoken_of[0] if len(spoken_of) == 1 else "ao"


def _te_recipe(options: Mapping[str, Any]) -> RecipeSpec:
    if _boolean(options, "use_mxfp8_block_scaling", False):
        raise ValueError("use_mxfp8_block_scaling is true; allowed: false. MXFP8 needs Blackwell GPUs. Remove the key.")
    operand_format = str(options.get("format", "HYBRID")).upper()
    if operand_format not in ("HYBRID", "E4M3"):
        advice = " E5M2 has 2 mantissa bits, too few for weights and activations." if operand_format == "E5M2" else ""
        raise ValueError(_one_of("fp8_format", options["format"], ("HYBRID", "E4M3")) + advice)
    override = _three_booleans(options)
    return RecipeSpec.model_validate(
        {
            "scaling": "delayed",
            "format": operand_format,
            "margin": options.get("margin", 0),
            "interval": options.get("interval", 1),
            "amax_history_length": options.get("amax_history_len", 1024),
            "amax_compute_algorithm": str(options.get("amax_compute_algo", "most_recent")).lower(),
            "high_precision_gemms": [gemm for gemm, wide in zip(GEMMS, override, strict=True) if wide],
            "fp8_in_evaluation": _boolean(options, "use_autocast_during_eval", False),
        }
    )


def _three_booleans(options: Mapping[str, Any]) -> list[bool]:
    """`override_linear_precision` as a list, `a,b,c` or `(a, b, c)`, or the three keys of the environment."""
    value = options.get("override_linear_precision")
    if value is None:
        return [_boolean(options, f"override_{gemm}", False) for gemm in ("fprop", "dgrad", "wgrad")]
    parts = str(value).strip("()[] ").split(",") if isinstance(value, str) else list(value)
    if len(parts) != 3:
        raise ValueError(f"override_linear_precision is {value!r}; allowed: three booleans, for fprop, dgrad and wgrad.")
    return [_boolean({"override_linear_precision": part}, "override_linear_precision", False) for part in parts]


def _opt_level(value: Any) -> str:
    level = str(value).strip().upper()
    if level not in ("O1", "O2", "O3"):
        hint = f" Did you mean 'O{level[1:]}', with the letter O?" if level in ("01", "02", "03") else ""
        raise ValueError(_one_of("opt_level", value, ("O1", "O2", "O3")) + hint)
    return level


def _boolean(options: Mapping[str, Any], key: str, default: bool) -> bool:
    value = options.get(key, default)
    word = str(value).strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError(_one_of(key, value, ("true", "false")))
    return word in _TRUE


def _one_of(key: str, got: Any, allowed: tuple[str, ...]) -> str:
    return f"{key} is {got!r}; allowed: {', '.join(allowed)}. Change it in fp8_config."
