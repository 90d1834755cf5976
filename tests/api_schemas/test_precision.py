"""A precision is a row of the table with options; options that do not fit the level are refused."""

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from octet.api_schemas.levels import LEVELS
from octet.api_schemas.precision import LevelName, PrecisionSpec
from octet.api_schemas.problem import explain
from octet.api_schemas.recipe import RecipeSpec


def test_schema_and_table_have_the_same_level_names() -> None:
    assert get_args(LevelName) == tuple(LEVELS)
    assert all(row.name == name for name, row in LEVELS.items())


def test_each_level_keeps_the_bytes_that_it_promised() -> None:
    found = {name: row.bytes_per_parameter for name, row in LEVELS.items()}
    promised = dict.fromkeys(("fp32", "fp16-amp", "bf16-amp", "te", "ao"), 16.0)
    promised |= {"O1": 11.1, "O2": 6.2, "O3": 7.2, "O3-split": 6.2, "O2-8bit": 5.2, "O3-split-8bit": 5.2}
    assert found | promised == found
    assert all((row.recipe is not None) == (row.gemm == "fp8") for row in LEVELS.values())


def test_the_recipe_is_the_levels_unless_the_job_has_its_own() -> None:
    assert PrecisionSpec(level="fp32").resolved_recipe is None
    te = PrecisionSpec(level="te").resolved_recipe
    assert te is not None
    assert (te.scaling, te.amax_history_length) == ("delayed", 1024)
    assert PrecisionSpec(level="O2", recipe=te).resolved_recipe == te


@pytest.mark.parametrize(
    ("document", "field", "allowed"),
    [
        ({"level": "bf16-amp", "recipe": {}}, "recipe", "recipe at level te, ao, O1"),
        ({"level": "O2", "torchao": {}}, "torchao", "torchao at level ao"),
        ({"level": "ao", "statistics_every": 10}, "statistics_every", "statistics_every at level te, O1"),
        ({"level": "ao", "auto_filter": False}, "auto_filter", "auto_filter at level te, O1"),
        ({"level": "fp32", "auto_filter": False}, "auto_filter", "auto_filter at level te, O1"),
        ({"level": "fp16-amp", "norms": "bf16"}, "norms", "bf16 where products are in bf16 or FP8: bf16-amp"),
        ({"level": "auto", "norms": "bf16"}, "norms", "bf16 where products are in bf16 or FP8: bf16-amp"),
        ({"level": "O2", "statistics_every": 0, "demotion": {}}, "demotion", "demotion only if statistics are sampled"),
        ({"level": "ao", "recipe": {"scaling": "delayed"}}, "recipe", "what torchao has: tensorwise"),
        ({"level": "O2", "recipe": {"scaling": "delayed", "granularity": "row"}}, "recipe.granularity", "tensor, if scaling"),
        ({"level": "O2", "recipe": {"fast_grad_input": True, "granularity": "row"}}, "recipe.granularity", "tensor, with fast"),
        ({"level": "te", "recipe": {"fast_grad_input": True, "granularity": "mx"}}, "recipe.granularity", "tensor, with fast"),
        (
            {"level": "O2", "recipe": {"fast_grad_input": True, "high_precision_gemms": ["grad_input"]}},
            "recipe.high_precision_gemms",
            "products without grad_input",
        ),
        ({"level": "ao", "recipe": {"fast_grad_input": True}}, "recipe", "what torchao has: tensorwise"),
        ({"level": "bf16-amp", "recipe": {"fast_grad_input": True}}, "recipe", "recipe at level te, ao, O1"),
        (
            {"level": "ao", "recipe": {"granularity": "row", "format": "E4M3"}, "torchao": {"fsdp_float8_all_gather": True}},
            "torchao",
            "fsdp_float8_all_gather with tensor scales",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(document: dict[str, Any], field: str, allowed: str) -> None:
    with pytest.raises(ValidationError) as caught:
        PrecisionSpec.model_validate(document)
    (violation,) = explain(caught.value, PrecisionSpec)
    assert violation.field == field
    assert allowed in str(violation.allowed)


@pytest.mark.parametrize("level", list(LEVELS))
def test_a_precision_with_every_field_written_out_is_read_again(level: str) -> None:
    precision = PrecisionSpec.model_validate({"level": level})
    assert PrecisionSpec.model_validate(precision.model_dump(mode="json")) == precision


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, "HYBRID, tensor scales, current"),
        ({"fast_grad_input": True}, "HYBRID, tensor scales, current; fast accumulation for grad_input"),
        ({"granularity": "block", "format": "E4M3", "margin": 1}, "E4M3, block scales, current; margin 1"),
        (
            {"scaling": "delayed", "high_precision_gemms": ["grad_weight"], "fp8_in_evaluation": False},
            "HYBRID, tensor scales, delayed over 16 steps (max, every 1); grad_weight in bf16; evaluation in bf16",
        ),
    ],
)
def test_a_recipe_in_words(document: dict[str, Any], words: str) -> None:
    assert str(RecipeSpec(**document)) == words
