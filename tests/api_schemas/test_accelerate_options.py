"""Every option of an Accelerate user, in every spelling, becomes a precision of ours or a clear refusal."""

from typing import Any

import pytest

from octet.api_schemas.accelerate import precision_from_accelerate
from octet.api_schemas.precision import PrecisionSpec, TorchaoSpec
from octet.api_schemas.recipe import RecipeSpec

HERE = "precision reads no more than formats; `octet import accelerate` reads all. Set "

# Written as accelerate/examples and the wizard write it, after parsing the YAML.
WHOLE_CONFIG: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "NO",
    "downcast_bf16": "no",
    "fp8_config": {
        "amax_compute_algo": "max",
        "amax_history_len": 1024,
        "backend": "TE",
        "fp8_format": "E4M3",
        "interval": 1,
        "margin": 0,
        "override_linear_precision": "(false, false, false)",
        "use_autocast_during_eval": False,
    },
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "fp8",
    "num_machines": 1,
    "num_processes": 1,
    "rdzv_backend": "static",
    "same_network": True,
    "use_cpu": False,
}


def te(**changes: Any) -> PrecisionSpec:
    """Build the precision that equals the defaults of Accelerate's TE backend, with changes."""
    defaults = {
        "scaling": "delayed",
        "amax_history_length": 1024,
        "amax_compute_algorithm": "most_recent",
        "fp8_in_evaluation": False,
    }
    return PrecisionSpec(level="te", recipe=RecipeSpec(**{**defaults, **changes}))


def test_a_whole_configuration_as_the_wizard_writes_it() -> None:
    assert precision_from_accelerate(WHOLE_CONFIG) == te(amax_compute_algorithm="max", format="E4M3")


@pytest.mark.parametrize(("mode", "level"), [("no", "fp32"), ("fp16", "fp16-amp"), ("bf16", "bf16-amp")])
def test_the_other_modes_of_mixed_precision(mode: str, level: str) -> None:
    assert precision_from_accelerate({**WHOLE_CONFIG, "mixed_precision": mode}) == PrecisionSpec(level=level)


@pytest.mark.parametrize(
    ("option", "recipe"),
    [
        ({"margin": 3}, {"margin": 3}),
        ({"fp8_margin": "3"}, {"margin": 3}),
        ({"--fp8_interval": 5}, {"interval": 5}),
        ({"ACCELERATE_FP8_INTERVAL": "5"}, {"interval": 5}),
        ({"fp8_format": "e4m3"}, {"format": "E4M3"}),
        ({"ACCELERATE_FP8_FORMAT": "HYBRID"}, {}),
        ({"amax_history_len": 32}, {"amax_history_length": 32}),
        ({"amax_history_length": 32}, {"amax_history_length": 32}),
        ({"amax_compute_algorithm": "MAX"}, {"amax_compute_algorithm": "max"}),
        ({"override_linear_precision": [True, False, True]}, {"high_precision_gemms": ("output", "grad_weight")}),
        ({"override_linear_precision": "false,true,false"}, {"high_precision_gemms": ("grad_input",)}),
        ({"override_linear_precision": (False, False, False)}, {}),
        ({"ACCELERATE_FP8_OVERRIDE_WGRAD": "1"}, {"high_precision_gemms": ("grad_weight",)}),
        ({"use_autocast_during_eval": "yes"}, {"fp8_in_evaluation": True}),
        ({"use_mxfp8_block_scaling": False}, {}),
    ],
)
def test_options_of_transformer_engine(option: dict[str, Any], recipe: dict[str, Any]) -> None:
    assert precision_from_accelerate(option) == te(**recipe)
    assert precision_from_accelerate({"backend": "te", **option}) == te(**recipe)


def test_mxfp8_of_transformer_engine_is_mx_in_e4m3() -> None:
    filled_in = {"amax_history_len": 1024, "amax_compute_algo": "most_recent", "fp8_format": "HYBRID"}
    for given in ({}, filled_in):
        spec = precision_from_accelerate({"backend": "te", "use_mxfp8_block_scaling": True, "margin": 1, **given})
        assert spec.recipe == RecipeSpec(granularity="mx", format="E4M3", margin=1, fp8_in_evaluation=False)


@pytest.mark.parametrize(
    "option",
    [
        {"opt_level": "O1"},
        {"opt_level": "o1"},
        {"fp8_opt_level": "O1"},
        {"optimization_level": "O1"},
        {"ACCELERATE_FP8_OPT_LEVEL": "O1"},
    ],
)
def test_options_of_ms_amp(option: dict[str, Any]) -> None:
    assert precision_from_accelerate(option) == PrecisionSpec(level="O1")
    assert precision_from_accelerate({"backend": "MS-AMP", **option}) == PrecisionSpec(level="O1")


def test_ms_amp_by_name_and_deepspeeds_section() -> None:
    assert precision_from_accelerate({"backend": "MSAMP"}) == PrecisionSpec(level="O2")
    assert precision_from_accelerate({"enabled": True}) == PrecisionSpec(level="O1")  # the default of MS-AMP's own section
    section = {"enabled": True, "opt_level": "O3", "use_te": True}
    assert precision_from_accelerate(section) == PrecisionSpec(level="O3", recipe=PrecisionSpec(level="te").resolved_recipe)


def test_options_of_torchao() -> None:
    skipping = {"skip_first_layers": 1, "skip_last_layers": 1}
    default = PrecisionSpec(level="ao", torchao=TorchaoSpec(pad_inner_dim=True), **skipping)
    assert precision_from_accelerate({}) == default
    assert precision_from_accelerate({"backend": "AO"}) == default
    options = {"pad_inner_dim": False, "enable_fsdp_float8_all_gather": "false"}
    assert precision_from_accelerate(options) == PrecisionSpec(level="ao", torchao=TorchaoSpec(), **skipping)


def test_options_without_effect_are_named_in_the_answer() -> None:
    sharded = WHOLE_CONFIG | {
        "distributed_type": "FSDP",
        "num_processes": 8,
        "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": False},
        "dynamo_config": {"dynamo_backend": "INDUCTOR"},
        "deepspeed_config": {"gradient_accumulation_steps": 4, "zero_stage": 0},
    }
    assert precision_from_accelerate(WHOLE_CONFIG).not_applied == ()
    assert precision_from_accelerate(sharded) == precision_from_accelerate(WHOLE_CONFIG).model_copy(
        update={
            "not_applied": (
                f"distributed_type FSDP: {HERE}parallelism.zero_stage",
                f"num_processes 8: {HERE}resources.workers",
                f"fsdp_config: fsdp_version: {HERE}parallelism.zero_stage: 3",
                f"deepspeed_config: gradient_accumulation_steps: {HERE}parallelism.zero_stage and training",
                f"dynamo_config: dynamo_backend: {HERE}training.compile",
            )
        }
    )
    gathering = precision_from_accelerate({"backend": "AO", "enable_fsdp_float8_all_gather": True})
    assert "a job shards by parallelism.zero_stage 3, and gathers as" in gathering.not_applied[0]


def test_a_configuration_that_switches_compilation_off_asks_for_nothing() -> None:
    config = WHOLE_CONFIG | {"dynamo_config": {"dynamo_backend": "no"}, "fsdp_config": {}, "downcast_bf16": "no"}
    assert precision_from_accelerate(config).not_applied == ()


def test_keys_of_other_backends_are_ignored_as_accelerate_does() -> None:
    assert precision_from_accelerate({**WHOLE_CONFIG["fp8_config"], "backend": "MSAMP"}) == PrecisionSpec(level="O2")


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ({"margn": 1}, "unknown key 'margn' in fp8_config. Did you mean 'margin'?"),
        ({"fp8_opt_levle": "O1"}, "Did you mean 'opt_level'?"),
        ({"mixed_precision": "fp8", "num_procs": 2}, "unknown key 'num_procs' in an Accelerate configuration"),
        ({"mixed_precision": "fp4"}, "mixed_precision is 'fp4'; allowed: no, fp16, bf16, fp8"),
        ({"backend": "cuda"}, "backend is 'cuda'; allowed: AO, TE, MSAMP"),
        ({"margin": 1, "fp8_margin": 2}, "sets 'margin' a second time"),
        ({"fp8_format": "E5M2"}, "allowed: HYBRID, E4M3. Change it. E5M2 keeps 2 bits"),
        ({"use_mxfp8_block_scaling": True, "interval": 2}, "interval is 2; allowed with use_mxfp8_block_scaling: none"),
        ({"amax_compute_algo": "min"}, "amax_compute_algo is 'min'; allowed: max, most_recent"),
        ({"margin": -1}, "margin is -1; allowed: a whole number from 0 up"),
        ({"interval": 0}, "interval is 0; allowed: a whole number from 1 up"),
        ({"override_linear_precision": "true,false"}, "allowed: three booleans"),
        ({"use_autocast_during_eval": "maybe"}, "use_autocast_during_eval is 'maybe'; allowed: true, false"),
        ({"opt_level": "02"}, "Did you mean 'O2', with the letter O?"),
        ({"opt_level": "O4"}, "opt_level is 'O4'; allowed: O1, O2, O3"),
        ({"enabled": False}, "Remove the msamp section"),
    ],
)
def test_an_option_that_cannot_run_is_refused_with_what_to_change(document: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint.replace("?", r"\?").replace(".", r"\.")):
        precision_from_accelerate(document)
