"""Accelerate's recipe classes without Transformer Engine: the same fields, defaults and precision as Accelerate's own."""

from dataclasses import fields
from typing import Any

import accelerate.utils
import pytest
import torch
from accelerate.utils import dataclasses as theirs
from torch import nn

import octet.compat.accelerate as ours
from octet.worker import initialize
from octet.worker.fp8.recipe_kwargs import precision_of
from tests.kit.small_model import Small


def converted(recipe: Any, **options: Any) -> Small:
    model = Small()
    initialize(model, torch.optim.AdamW(model.parameters()), recipe=recipe, **options)
    return model


def test_transformer_engine_need_not_be_there() -> None:
    with pytest.raises(ImportError, match="TransformerEngine is not available"):
        accelerate.utils.TERecipeKwargs()
    model = converted(ours.TERecipeKwargs(margin=1, amax_history_len=4))
    assert model.octet_report.level == "te"
    assert (model.first.recipe.margin, model.first.recipe.amax_history_length) == (1, 4)


@pytest.mark.parametrize("name", ours.__all__)
@pytest.mark.parametrize("changes", [False, True])
def test_fields_and_meaning_are_accelerates(name: str, changes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs, "is_transformer_engine_available", lambda: True)
    own, other = getattr(ours, name), getattr(accelerate.utils, name)
    assert [field.name for field in fields(own)] == [field.name for field in fields(other)]
    changed: dict[str, dict[str, Any]] = {
        "TERecipeKwargs": {"margin": 2, "fp8_format": "E4M3", "override_linear_precision": (True, False, False)},
        "MSAMPRecipeKwargs": {"opt_level": "O1"},
        "AORecipeKwargs": {"pad_inner_dim": False, "module_filter_func": lambda module, name: name == "last"},
    }
    options = changed[name] if changes else {}
    for is_sharded in (False, True):
        found = precision_of(own(**options), None, Small(), is_sharded=is_sharded)
        assert found == precision_of(other(**options), None, Small(), is_sharded=is_sharded)


@pytest.mark.parametrize(
    ("recipe", "level"),
    [
        ({"backend": "TE", "amax_history_len": 8}, "te"),
        ({"fp8_format": "E4M3"}, "te"),
        ({"backend": "MSAMP", "opt_level": "O1"}, "O1"),
        ({"optimization_level": "O2"}, "O2"),
        ({"backend": "AO"}, "ao"),
    ],
)
def test_a_dict_of_accelerates_fields_is_a_recipe(recipe: dict[str, Any], level: str) -> None:
    assert converted(recipe).octet_report.level == level


def test_a_dict_of_ours_stays_one_and_levels_are_combined() -> None:
    """margin and interval have the same name in both; with no other key they are ours, at the default level."""
    model = converted({"margin": 3, "interval": 2, "scaling": "delayed"})
    assert model.octet_report.level == "O2"
    model = converted({"backend": "TE", "margin": 3}, opt_level="O3")
    assert (model.octet_report.level, model.first.recipe.margin) == ("O3", 3)
    with pytest.raises(ValueError, match="opt_level is 'O3' and the fp8_config means level O1"):
        converted({"opt_level": "O1", "backend": "MSAMP"}, opt_level="O3")
    model = Small()
    with pytest.raises(ValueError, match="unknown key 'margn' in fp8_config"):
        initialize(model, recipe={"backend": "TE", "margn": 3})
    assert type(model.first) is nn.Linear
