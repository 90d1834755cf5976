"""Which layers are converted, why the others are not, and that nothing else about the model changes."""

from typing import Any

import pytest
import torch
from torch import nn

from octet.api_schemas import GPTSizes
from octet.api_schemas.precision import PrecisionSpec
from octet.worker.fp8.convert import (
    ConversionReport,
    FilteredLayer,
    SkippedLayer,
    filter_layers,
    replace_layers,
    replaceable_linears,
    select_layers,
)
from octet.worker.fp8.speedups import Chip
from octet.worker.models.gpt import GPT

TINY = GPTSizes(hidden_size=32, num_layers=2, num_heads=4, vocab_size=64, max_sequence_length=16)


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
    assert "MultiheadAttention, reads the weight itself" in why["encoder.self_attn.out_proj"]
    assert replaceable_linears(model) == ["small", "encoder.linear1", "encoder.linear2"]


def test_strict_refuses_what_nobody_asked_for() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8))
    with pytest.raises(ValueError, match=r"1: 32 -> 8 features; .*; the glob 'blocks.\*' matches no linear layer"):
        select_layers(model, PrecisionSpec(exclude=("blocks.*",), strict=True))
    assert select_layers(model, PrecisionSpec(exclude=("1",), strict=True))[0] == ["0"]


@pytest.mark.parametrize(("capability", "rules", "expected"), [
    ((9, 0), {}, ["0", "1"]), ((9, 0), {"strict": True}, ["0", "1"]), ((9, 0), {"level": "te"}, ["0", "1"]),
    ((9, 0), {"auto_filter": False}, []), ((9, 0), {"level": "ao"}, []), ((9, 0), {"level": "bf16-amp"}, []),
    ((10, 0), {}, ["0", "1"]), ((10, 0), {"recipe": {"granularity": "mx"}}, []), (None, {}, []),
])  # fmt: skip
def test_layers_that_gain_nothing_are_told(
    capability: tuple[int, int] | None, rules: dict[str, Any], expected: list[str]
) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 768), nn.Linear(8192, 8192))
    spec = PrecisionSpec(**rules)
    selected, skipped = select_layers(model, spec)
    filtered = filter_layers(model, selected, spec, 8192, capability and Chip("A card", capability))
    assert [layer.name for layer in filtered] == expected
    assert (len(selected), skipped) == (3, [])  # they are converted all the same
    for layer, shape in zip(filtered, ("512 -> 512", "512 -> 768"), strict=False):
        assert layer.reason.startswith(f"{shape} features at 8,192 tokens: 0.")


def test_more_tokens_make_fp8_worth_it() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2048, 2048))
    card = Chip("A card", (9, 0))
    assert [len(filter_layers(model, ["0"], PrecisionSpec(), tokens, card)) for tokens in (64, 65536)] == [1, 0]


def test_the_report_tells_which_layers_multiply_in_bf16_and_why() -> None:
    filtered = tuple(FilteredLayer(name, "small") for name in ("0", "1"))
    report = ConversionReport("O2", ("0", "1", "2"), (), filtered, 1)
    assert str(report).splitlines() == [
        "level O2: 3 layers converted (2 of them multiply in bf16), 0 skipped",
        "  converted 0, in bf16: small",
        "  converted 1, in bf16: small",
        "  converted 2",
    ]
    assert report.why_filtered == "2 of small"


def test_the_report_says_when_nothing_was_converted_and_why() -> None:
    def report_of(model: nn.Module, **rules: Any) -> ConversionReport:
        selected, skipped = select_layers(model, PrecisionSpec(**rules))
        return ConversionReport("O2", tuple(selected), tuple(skipped), (), 0)

    linears = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 32), nn.Linear(32, 32))
    assert report_of(linears).nothing_converted is None
    assert report_of(nn.Conv2d(3, 8, 3)).nothing_converted == "nothing was converted: the model has no linear layers"
    excluded = report_of(linears, exclude=("2",))
    assert excluded.nothing_converted == (
        "nothing was converted: 1 of 32 -> 8 features; FP8 products need at least 16; "
        "1 of 8 -> 32 features; FP8 products need at least 16; 1 of excluded by name"
    )
    assert f"  {excluded.nothing_converted}" in str(excluded).splitlines()


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
