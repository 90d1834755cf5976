"""Hugging Face's Conv1D has a weight (in, out): the products are those of nn.Linear, and the parameter stays."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octet.api_schemas.levels import LEVELS
from octet.api_schemas.precision import PrecisionSpec
from octet.api_schemas.recipe import RecipeSpec
from octet.worker import initialize
from octet.worker.fp8.bf16 import HalfLinear
from octet.worker.fp8.convert import ConversionReport, SkippedLayer, replaceable_linears, select_layers
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.recipe import Recipe
from octet.worker.fp8.weights import encode_weight

K, N, T = 288, 144, 200
SPECS = {
    "tensor": RecipeSpec(),
    "delayed": RecipeSpec(scaling="delayed", amax_history_length=1),
    "row": RecipeSpec(granularity="row"),
    "block": RecipeSpec(granularity="block"),
    "block, hybrid": RecipeSpec(granularity="block", format="HYBRID"),
    "all in bf16": RecipeSpec(high_precision_gemms=("output", "grad_input", "grad_weight")),
    "grad_weight in bf16": RecipeSpec(high_precision_gemms=("grad_weight",)),
}


def spread(*shape: int, seed: int) -> Tensor:
    """Gaussian numbers, each row and column of its own magnitude."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (2.0 ** torch.randint(-3, 4, (size,), generator=generator) for size in shape)
    return torch.randn(shape, generator=generator) * rows[:, None] * columns


def twins() -> tuple[nn.Linear, nn.Module]:
    """The same weight and bias in both layouts."""
    from transformers.pytorch_utils import Conv1D

    linear, conv = nn.Linear(K, N), Conv1D(N, K)
    with torch.no_grad():
        linear.weight.copy_(spread(N, K, seed=0) / 16)
        conv.weight.copy_(linear.weight.t())
        conv.bias.copy_(linear.bias)
    return linear, conv


def run(layer: nn.Module) -> dict[str, Tensor]:
    input_TK = spread(T, K, seed=1).requires_grad_()
    output_TN = layer(input_TK)
    output_TN.backward(spread(T, N, seed=2))
    gradient = layer.weight.grad
    values = gradient.dequantize() if isinstance(gradient, Float8Gradient) else gradient
    return {"output": output_TN.detach(), "grad_input": input_TK.grad, "grad_weight": values, "grad_bias": layer.bias.grad}


@pytest.mark.parametrize("level", ["te", "O2", "O3", "O3-split"])
@pytest.mark.parametrize("name", SPECS)
def test_products_are_those_of_the_other_layout(name: str, level: str) -> None:
    """A weight is quantized the same either way: kinds by row follow the product, not the layout."""
    linear, conv = twins()
    expected, actual = (
        run(Float8Linear(module, Recipe.resolve(SPECS[name]), encode_weight(module.weight, LEVELS[level])))
        for module in (linear, conv)
    )
    actual["grad_weight"] = actual["grad_weight"].t()
    for product, values in expected.items():  # the codes are the same; a CPU sums them in another order
        torch.testing.assert_close(actual[product], values, rtol=1e-4, atol=1e-4 * float(values.abs().max()), msg=product)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own doing
def test_it_compiles_to_the_same() -> None:
    torch.compiler.reset()
    eager, layer = (
        Float8Linear(twins()[1], Recipe.resolve(RecipeSpec(granularity="row")), encode_weight(twins()[1].weight, LEVELS["O2"]))
        for _ in range(2)
    )
    layer.load_state_dict(eager.state_dict())
    inputs = [spread(T, K, seed=1).requires_grad_() for _ in range(2)]
    expected, actual = eager(inputs[0]), torch.compile(layer, backend="aot_eager", fullgraph=True)(inputs[1])
    for output in (expected, actual):
        output.square().sum().backward()
    assert torch.equal(actual, expected)
    assert torch.equal(inputs[1].grad, inputs[0].grad)
    assert torch.equal(layer.weight.grad, eager.weight.grad)


def test_a_bf16_layer_multiplies_as_the_other_layout() -> None:
    linear, conv = twins()
    expected, actual = (run(HalfLinear(module, torch.bfloat16)) for module in (linear, conv))
    actual["grad_weight"] = actual["grad_weight"].t()
    for product, values in expected.items():
        torch.testing.assert_close(actual[product], values, rtol=2**-7, atol=1e-2 * float(values.abs().max()), msg=product)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    tokens = torch.randint(96, (8, 32), generator=torch.Generator().manual_seed(0))
    seen = []
    for _ in range(12):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def train(level: str) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(0)
    model = gpt2()
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=2e-3), opt_level=level)
    return model, losses(model.train(), optimizer)


@pytest.fixture(scope="module")
def in_fp32() -> list[float]:
    return train("fp32")[1]


@pytest.mark.system
@pytest.mark.parametrize(
    "level", ["O2", "O3-split", "bf16-amp", *(pytest.param(level, marks=pytest.mark.matrix) for level in ("O1", "te"))]
)
def test_gpt2_learns_as_in_fp32(level: str, in_fp32: list[float]) -> None:
    model, seen = train(level)
    report = model.octet_report
    assert isinstance(report, ConversionReport)
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert report.converted == tuple(f"transformer.h.{block}.{name}" for block in range(2) for name in layers)
    assert [(layer.name, layer.by_request) for layer in report.skipped] == [("lm_head", True)]
    assert report.nothing_converted is None
    assert in_fp32[-1] < 0.9 * in_fp32[0]
    assert seen[-1] == pytest.approx(in_fp32[-1], rel=0.02)
    assert seen != in_fp32


@pytest.mark.parametrize("level", ["te", "O2", "bf16-amp"])
def test_parameters_and_their_shapes_stay(level: str) -> None:
    plain = gpt2()
    before = dict(plain.named_parameters())
    model, _ = initialize(plain, torch.optim.AdamW(plain.parameters()), opt_level=level)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is parameter for name, parameter in before.items())
    assert after["transformer.h.0.mlp.c_fc.weight"].shape == (64, 256)
    twin = copy.deepcopy(model)
    twin.load_state_dict(model.state_dict())


def skipped(model: nn.Module, **rules: Any) -> list[SkippedLayer]:
    return select_layers(model, PrecisionSpec(**rules))[1]


def test_torchao_and_subclasses_are_left_alone_with_the_reason() -> None:
    from transformers.pytorch_utils import Conv1D

    class Special(Conv1D):
        pass

    model = nn.ModuleDict({"plain": Conv1D(32, 64), "special": Special(32, 64)})
    assert replaceable_linears(model) == ["plain"]
    assert [layer.reason for layer in skipped(model)] == ["Special is a subclass of Conv1D that may compute something else"]
    by_torchao = {layer.name: layer.reason for layer in skipped(model, level="ao")}
    assert by_torchao["plain"] == "Conv1D stores its weight as (in, out); torchao converts nn.Linear alone"
