"""Accelerate's recipe classes, the real ones, given to `initialize`."""

import warnings
from typing import Any

import pytest
import torch
from accelerate.utils import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs, dataclasses
from torch import nn
from torchao.float8 import Float8LinearConfig

from octet.worker import initialize
from octet.worker.fp8.convert import ConversionReport
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.recipe_kwargs import precision_of
from tests.kit.small_model import Small


@pytest.fixture(autouse=True)
def transformer_engine_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe's class asks for the package although nothing of it is used here."""
    monkeypatch.setattr(dataclasses, "is_transformer_engine_available", lambda: True)


def converted(**options: Any) -> tuple[Small, ConversionReport]:
    model = Small()
    model, _ = initialize(model, torch.optim.AdamW(model.parameters()), **options)
    report = model.octet_report
    assert isinstance(report, ConversionReport)
    return model, report


def test_transformer_engines_recipe_at_its_own_level_and_at_another() -> None:
    recipe = TERecipeKwargs(
        margin=1, fp8_format="E4M3", amax_history_len=4, amax_compute_algo="max", override_linear_precision=(False, False, True)
    )
    model, report = converted(recipe=recipe)
    assert report.level == "te"
    assert isinstance(model.first, Float8Linear)
    held = model.first.recipe
    assert (held.amax_history_length, held.margin, held.high_precision) == (4, 1, {"grad_weight"})
    _, report = converted(recipe=recipe, opt_level="O3")
    assert report.level == "O3"


def test_ms_amps_level_and_the_old_class_of_both() -> None:
    _, report = converted(recipe=MSAMPRecipeKwargs(opt_level="O1"))
    assert report.level == "O1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the class is deprecated
        te, msamp = FP8RecipeKwargs(backend="TE", margin=2), FP8RecipeKwargs(backend="msamp", opt_level="O2")
    spec = precision_of(te, None, Small()).resolved_recipe
    assert spec is not None
    assert (spec.margin, spec.amax_history_length) == (2, 1024)
    assert precision_of(msamp, None, Small()).level == "O2"
    with pytest.raises(ValueError, match=r"opt_level is 'O3' and the MSAMPRecipeKwargs means level O1"):
        converted(recipe=MSAMPRecipeKwargs(opt_level="O1"), opt_level="O3")


def test_torchaos_config_and_filter() -> None:
    _, report = converted(recipe=AORecipeKwargs())
    assert report.level == "ao"
    assert report.converted == ("inner.0", "inner.2")  # as Accelerate: neither the first nor the last
    spec = precision_of(AORecipeKwargs(pad_inner_dim=True), None, Small())
    assert spec.torchao is not None
    assert spec.torchao.pad_inner_dim
    assert "enable_fsdp_float8_all_gather" in spec.not_applied[0]
    assert not spec.torchao.fsdp_float8_all_gather
    sharded = precision_of(AORecipeKwargs(), None, Small(), is_sharded=True)
    assert sharded.torchao is not None
    assert sharded.torchao.fsdp_float8_all_gather
    assert not sharded.not_applied
    with pytest.raises(ValueError, match="fsdp_float8_all_gather is True and there is an optimizer; allowed: none yet"):
        initialize(Small(), None, "ao", optimizer_name="adamw", torchao={"fsdp_float8_all_gather": True})

    def only_last(module: nn.Module, name: str) -> bool:
        return name == "last"

    rowwise = AORecipeKwargs(config=Float8LinearConfig.from_recipe_name("rowwise"), module_filter_func=only_last)
    assert precision_of(rowwise, None, Small()).torchao_recipe == "rowwise"
    _, report = converted(recipe=rowwise)
    assert report.converted == ("last",)


def test_a_field_that_is_not_built_is_refused_by_name_and_nothing_is_changed() -> None:
    rounding = AORecipeKwargs(config=Float8LinearConfig(round_scales_to_power_of_2=True))
    for recipe, message in (
        (TERecipeKwargs(use_mxfp8_block_scaling=True, amax_history_len=32), "amax_history_len is 32; allowed with use_mxfp8"),
        (TERecipeKwargs(fp8_format="E5M2"), "fp8_format is 'E5M2'"),
        (rounding, "config changes round_scales_to_power_of_2"),
    ):
        model = Small()
        with pytest.raises(ValueError, match=message):
            initialize(model, recipe=recipe)
        assert type(model.first) is nn.Linear
