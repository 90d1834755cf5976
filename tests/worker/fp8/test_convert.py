"""Which layers are converted, why the others are not, and that nothing else about the model changes."""

import pytest
from torch import nn

from api_schemas.precision import PrecisionSpec
from worker.fp8.convert import SkippedLayer, replace_layers, replaceable_linears, select_layers
from worker.models import GPT, GPTConfig

TINY = GPTConfig(hidden_size=32, num_layers=2, num_heads=4, vocab_size=64, max_sequence_length=16)


class Replacement(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias


def reasons(model: nn.Module, **rules: object) -> dict[str, str]:
    _, skipped = select_layers(model, PrecisionSpec(**rules))
    return {layer.name: layer.reason for layer in skipped}


def test_a_gpt_converts_everything_but_its_head() -> None:
    selected, skipped = select_layers(GPT(TINY), PrecisionSpec())
    expected = ["attention.qkv", "attention.output", "mlp.up", "mlp.down"]
    assert selected == [f"blocks.{block}.{name}" for block in range(2) for name in expected]
    assert [(layer.name, layer.by_request) for layer in skipped] == [("head", True)]


def test_globs_include_and_exclude() -> None:
    selected, skipped = select_layers(GPT(TINY), PrecisionSpec(include=("*.mlp.*",), exclude=("blocks.1.*",)))
    assert selected == ["blocks.0.mlp.up", "blocks.0.mlp.down"]
    assert SkippedLayer("blocks.1.mlp.up", "excluded by name", by_request=True) in skipped
    assert SkippedLayer("blocks.0.attention.qkv", "not included by name", by_request=True) in skipped


def test_layers_at_the_ends_may_be_left_out() -> None:
    selected, skipped = select_layers(GPT(TINY), PrecisionSpec(level="O2", skip_first_layers=1, skip_last_layers=2))
    assert len(selected) == 6
    assert [layer.name for layer in skipped] == ["blocks.0.attention.qkv", "blocks.1.mlp.down", "head"]
    assert skipped[0].reason == "among the first 1 or last 2 linear layers"


def test_a_tied_weight_is_left_alone_even_where_heads_are_converted() -> None:
    assert "shared with another module" in reasons(GPT(TINY), convert_heads=True)["head"]


def test_layers_that_another_module_may_read_are_left_alone() -> None:
    class Special(nn.Linear):
        pass

    hooked = nn.Linear(32, 32)
    hooked.register_forward_hook(lambda *_: None)
    model = nn.ModuleDict(
        {
            "special": Special(32, 32),
            "hooked": hooked,
            "small": nn.Linear(32, 8),
            "encoder": nn.TransformerEncoderLayer(32, 4, 64),
        }
    )
    why = reasons(model)
    assert "Special is a subclass" in why["special"]
    assert "hooks" in why["hooked"]
    assert "32 -> 8" in why["small"]
    assert "TransformerEncoderLayer, reads the weight" in why["encoder.linear1"]
    assert "NonDynamicallyQuantizableLinear is a subclass" in why["encoder.self_attn.out_proj"]
    assert replaceable_linears(model) == ["small"]


def test_strict_refuses_what_nobody_asked_for() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8))
    with pytest.raises(ValueError, match=r"1: 32 -> 8 features; .*; the glob 'blocks.\*' matches no linear layer"):
        select_layers(model, PrecisionSpec(exclude=("blocks.*",), strict=True))
    assert select_layers(model, PrecisionSpec(exclude=("1",), strict=True))[0] == ["0"]


def test_a_layer_used_twice_is_replaced_in_both_places() -> None:
    shared = nn.Linear(32, 32)
    model = nn.Sequential(shared, nn.Sequential(shared, nn.GELU()))
    selected, _ = select_layers(model, PrecisionSpec())
    assert selected == ["0"]
    replace_layers(model, selected, Replacement)
    assert isinstance(model[0], Replacement)
    assert model[0] is model[1][0]
    assert model[0].weight is shared.weight


def test_a_model_that_is_one_layer_comes_back_replaced() -> None:
    linear = nn.Linear(32, 32)
    assert isinstance(replace_layers(linear, select_layers(linear, PrecisionSpec())[0], Replacement), Replacement)
