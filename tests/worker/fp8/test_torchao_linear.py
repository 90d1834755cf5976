"""Level ao is torchao's own layer, with torchao's own recipes."""

import pytest
import torch
from torch import nn

from octet.worker import initialize

RECIPES = {
    "tensorwise": {},
    "rowwise": {"granularity": "row", "format": "E4M3"},
    "rowwise_with_gw_hp": {"granularity": "row", "format": "E4M3", "high_precision_gemms": ["grad_weight"]},
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_layer_is_torchaos_with_the_recipe_of_that_name(name: str) -> None:
    from torchao.float8.float8_linear import Float8Linear

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32))
    weight, input = model[0].weight, torch.randn(16, 64)
    expected = model(input)
    model, optimizer = initialize(
        model, torch.optim.AdamW(model.parameters()), opt_level="ao", recipe=RECIPES[name], torchao={"pad_inner_dim": True}
    )
    assert isinstance(model[0], Float8Linear)
    assert model[0].weight is weight
    config = model[0].config
    assert config.pad_inner_dim
    assert config.emulate
    assert config.cast_config_input.scaling_granularity.value == ("tensorwise" if name == "tensorwise" else "axiswise")
    assert config.cast_config_input_for_grad_weight.scaling_type.value == ("disabled" if "gw_hp" in name else "dynamic")
    output = model(input)
    assert 0 < ((output - expected).norm() / expected.norm()).item() < 0.06
    output.square().mean().backward()
    before = weight.clone()
    optimizer.step()
    assert not torch.equal(weight, before)


def test_recipes_that_torchao_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"allowed: what torchao has: tensorwise.*rowwise_with_gw_hp"):
        initialize(nn.Linear(32, 32), opt_level="ao", recipe={"granularity": "block"})
