"""The FP8 linear layer: its three products on the operands' decoded values, and how it lives as a module."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from octet.api_schemas.levels import LEVELS
from octet.api_schemas.recipe import RecipeSpec
from octet.worker import initialize, kernels
from octet.worker.fp8.accelerator import cpu_as_accelerator
from octet.worker.fp8.bf16 import HalfLinear
from octet.worker.fp8.fallback import Fallback
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.recipe import Recipe
from octet.worker.fp8.rounding_position import RoundingPosition
from octet.worker.fp8.weights import encode_weight
from octet.worker.kernels import dequantize, quantize

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def make_linear(in_features: int = 48, out_features: int = 32, seed: int = 0) -> nn.Linear:
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(in_features, out_features)
    with torch.no_grad():
        linear.weight.normal_(0.0, 0.02, generator=generator)
        linear.bias.normal_(0.0, 0.02, generator=generator)
    return linear


def convert(linear: nn.Linear, level: str = "O2", recipe: Recipe | None = None) -> Float8Linear:
    row = LEVELS[level]
    position = RoundingPosition(seed=0, stream=0) if row.weight_gradient == "fp8" else None
    return Float8Linear(linear, recipe or Recipe(), encode_weight(linear.weight, row), position)


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    return dequantize(*quantize(values, dtype))


def random_values(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("features", [(48, 32), (24, 20)], ids=["aligned", "padded"])
def test_what_it_returns_can_be_added_to_in_place(features: tuple[int, int]) -> None:
    """Falcon does it. Autograd refuses that for views of what a Function returns."""
    layer, input = convert(make_linear(*features)), random_values(2, 5, features[0])
    added = random_values(2, 5, features[1], seed=3).requires_grad_()
    expected = layer(input) + added
    output = layer(input)
    output += added
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
    output.sum().backward()
    assert layer.weight.grad is not None
    assert torch.equal(added.grad, torch.ones_like(added))


@pytest.mark.parametrize("level", ["te", "O2", "O3", "O3-split"])
def test_the_three_products(level: str) -> None:
    linear = make_linear()
    weight_NK, bias_N = linear.weight.detach().clone(), linear.bias.detach().clone()
    layer = convert(linear, level)
    input_TK, grad_output_TN = random_values(24, 48).requires_grad_(), random_values(24, 32, seed=2)
    output_TN = layer(input_TK)
    output_TN.backward(grad_output_TN)

    stored_NK = rounded(weight_NK, torch.float16) if level == "O2" else weight_NK
    input_values, weight_values = rounded(input_TK, E4M3), rounded(stored_NK, E4M3)
    if level == "O3-split":  # rounded in two steps, so a tie may go the other way
        codes = dequantize(layer.weight.codes, layer.weight.dequant_scale)
        torch.testing.assert_close(codes, weight_values, rtol=2**-3, atol=0)
        torch.testing.assert_close(layer.weight_values(), weight_NK, rtol=2**-11, atol=2**-20)
        weight_values = codes
    grad_values = rounded(grad_output_TN, E5M2)
    torch.testing.assert_close(output_TN, input_values @ weight_values.T + bias_N)
    torch.testing.assert_close(input_TK.grad, grad_values @ weight_values)
    torch.testing.assert_close(layer.bias.grad, grad_output_TN.sum(0))
    grad_weight_NK = grad_values.T @ input_values
    if level == "te":
        torch.testing.assert_close(layer.weight.grad, grad_weight_NK)
    else:
        assert isinstance(layer.weight.grad, Float8Gradient)
        torch.testing.assert_close(layer.weight.grad.dequantize(), rounded(grad_weight_NK, E4M3), rtol=2**-3, atol=1e-4)


def filtered(linear: nn.Linear, level: str) -> Float8Linear:
    """In bf16, with weight gradients as the product gives them."""
    layer = Float8Linear(linear, Recipe(), encode_weight(linear.weight, LEVELS[level]))
    layer.fallback = Fallback.TOO_SMALL
    return layer


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


@pytest.mark.parametrize("level", ["te", "O2", "O3", "O3-split"])
def test_a_layer_in_bf16_computes_what_bf16_amp_does(level: str) -> None:
    layer = filtered(make_linear(), level)
    twin = make_linear()
    with torch.no_grad():
        twin.weight.copy_(layer.weight_values())
    half = HalfLinear(twin, torch.bfloat16)
    input_BTK, grad_output_BTN = random_values(2, 12, 48).requires_grad_(), random_values(2, 12, 32, seed=2)
    other_BTK = input_BTK.detach().clone().requires_grad_()
    output_BTN, expected_BTN = layer(input_BTK), half(other_BTK)
    output_BTN.backward(grad_output_BTN)
    expected_BTN.backward(grad_output_BTN)
    assert torch.equal(bits(output_BTN), bits(expected_BTN))
    assert torch.equal(bits(input_BTK.grad), bits(other_BTK.grad))
    assert torch.equal(bits(layer.weight.grad), bits(twin.weight.grad))
    if level == "te":
        assert torch.equal(bits(layer.bias.grad), bits(twin.bias.grad))
    else:  # summed before it is rounded
        torch.testing.assert_close(layer.bias.grad, grad_output_BTN.sum((0, 1)))


@pytest.mark.parametrize("level", ["te", "O2", "O3", "O3-split"])
def test_a_weight_decoded_to_bf16_is_rounded_once(level: str) -> None:
    layer = convert(make_linear(), level)
    assert torch.equal(bits(layer.weight_values(torch.bfloat16)), bits(layer.weight_values().to(torch.bfloat16)))


def test_a_layer_in_bf16_keeps_its_input_in_bf16_and_no_second_weight() -> None:
    layer, kept = filtered(make_linear(), "O2"), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(random_values(64, 48))
    assert [tensor.dtype for tensor in kept if tensor.numel() == 64 * 48] == [torch.bfloat16]
    assert [tensor.dtype for tensor in kept if tensor.numel() == 32 * 48] == [torch.float16]


@pytest.mark.parametrize("is_shared", [False, True])
def test_passes_in_flight_share_a_weight_in_bf16(is_shared: bool) -> None:
    inputs = [random_values(64, 48, seed=seed).requires_grad_() for seed in range(3)]
    layers = [HalfLinear(make_linear(), torch.bfloat16) for _ in range(2)]
    kept: list[Tensor] = []
    with cpu_as_accelerator():
        if is_shared:
            layers[1].share_cast()
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
            in_flight = [layers[1](input_TK) for input_TK in inputs]
        layers[1].drop_cast()
        for input_TK, output_TN in zip(inputs, in_flight, strict=True):
            expected_TN = layers[0](input_TK)
            assert torch.equal(bits(output_TN), bits(expected_TN))
            output_TN.sum().backward()
            expected_TN.sum().backward()
    assert len({tensor.data_ptr() for tensor in kept if tensor.numel() == 32 * 48}) == (1 if is_shared else 3)
    for one, other in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        assert torch.equal(bits(one.grad), bits(other.grad))


@pytest.mark.parametrize("level", ["te", "O2"])
def test_autocast_decides_the_outputs_dtype_and_nothing_else(level: str) -> None:
    layer, input_TK = convert(make_linear(), level), random_values(24, 48)
    expected = layer(input_TK)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(input_TK)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, rtol=2**-7, atol=2**-9)
    output.sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_flops_are_those_of_three_products() -> None:
    layer, input_TK = convert(make_linear()), random_values(24, 48).requires_grad_()
    kernels.count_flops()
    with FlopCounterMode(display=False) as counter:
        layer(input_TK).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 24 * 48 * 32


def test_a_bf16_weights_gradient_is_rounded_once_from_the_product() -> None:
    """It has the bits of an fp32 gradient that is cast afterwards. On a GPU the cast would be another pass over it."""
    gradients = []
    for dtype in (torch.bfloat16, torch.float32):
        linear = make_linear().bfloat16()
        layer = convert(linear.to(dtype), "te")
        made: list[torch.dtype] = []
        with RecordsProducts(made):
            layer(random_values(64, 48).bfloat16()).float().square().sum().backward()
        assert made[-1] == dtype
        assert layer.weight.grad is not None
        gradients.append(layer.weight.grad.bfloat16())
    assert torch.equal(*gradients)


class RecordsProducts(TorchDispatchMode):
    """Records the dtype of each weight gradient as its product makes it."""

    def __init__(self, dtypes: list[torch.dtype]) -> None:
        super().__init__()
        self.dtypes = dtypes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.octet.linear_gradients.default:
            self.dtypes.append(result[-1].dtype)
        return result


@pytest.mark.parametrize("product", ["output", "grad_input"])
def test_codes_are_quantized_by_the_amax_that_the_optimizer_keeps(product: str) -> None:
    """No step reads a weight once more to find it: given one that is 2^20 times as large, all codes become zero."""
    layer, found = convert(make_linear(), "O2"), []
    assert layer.encoded is not None
    for _ in range(2):
        input_TK = random_values(32, 48).requires_grad_()
        output_TN = layer(input_TK)
        output_TN.backward(random_values(32, 32, seed=2))
        found.append(output_TN.detach() if product == "output" else input_TK.grad)
        layer.encoded.values_amax *= 2.0**20
    assert found[0].count_nonzero() > found[0].numel() // 2
    assert not (found[1] - (layer.bias if product == "output" else 0)).any()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own doing
@pytest.mark.parametrize(
    ("level", "granularity"),
    [
        pytest.param(level, granularity, marks=() if level == "O2" or granularity == "tensor" else pytest.mark.matrix)
        for level in ("te", "O2", "O3")
        for granularity in ("tensor", "row", "block")
    ],
)
def test_a_compiled_graph_holds_ops_of_ours_and_no_others_on_codes(level: str, granularity: str) -> None:
    """Inductor may fuse around our kernels, but must not take them apart."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch.compiler.reset()
    graphs: list[torch.fx.Graph] = []

    def keep(module: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    layer = convert(make_linear(), level, Recipe.resolve(RecipeSpec(granularity=granularity)))
    compiled = torch.compile(layer, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)
    input_TK = random_values(24, 48).requires_grad_()
    output_TN = compiled(input_TK)
    output_TN.sum().backward()
    assert torch.equal(output_TN, layer(input_TK))
    calls = [node for graph in graphs for node in graph.nodes if node.op == "call_function"]
    products = [str(node.target) for node in calls if ".linear_" in str(node.target)]
    assert products == ["octet.linear_output.default", "octet.linear_gradients.default"]
    on_codes = [node for node in calls if any(holds_codes(argument) for argument in node.all_input_nodes)]
    views = ("octet.", "aten.t.", "aten.transpose.", "aten.permute.", "aten.detach.", "<built-in function getitem>")
    assert [str(node.target) for node in on_codes if not str(node.target).startswith(views)] == []


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("level", ["te", "O3-split", pytest.param("O2", marks=pytest.mark.matrix)])
def test_a_layer_in_bf16_compiles_to_the_same(level: str) -> None:
    torch.compiler.reset()
    layer, twin = filtered(make_linear(), level), filtered(make_linear(), level)
    one, other = (random_values(24, 48).requires_grad_() for _ in range(2))
    output, expected = torch.compile(layer, backend="aot_eager", fullgraph=True)(one), twin(other)
    output.sum().backward()
    expected.sum().backward()
    assert torch.equal(output, expected)
    assert torch.equal(one.grad, other.grad)
    assert torch.equal(layer.weight.grad, twin.weight.grad)
    assert torch.equal(layer.bias.grad, twin.bias.grad)


def holds_codes(node: torch.fx.Node) -> bool:
    return isinstance(node.meta["val"], Tensor) and node.meta["val"].dtype in (E4M3, E5M2)


def test_any_leading_shape() -> None:
    layer = convert(make_linear())
    input_BTK = random_values(2, 3, 48)
    torch.testing.assert_close(layer(input_BTK)[1, 2], layer(input_BTK.reshape(6, 48))[5])
    assert layer(input_BTK[0, 0]).shape == (32,)


def test_backward_keeps_codes_not_the_input() -> None:
    layer = convert(make_linear())
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(random_values(64, 48))
    activations = [tensor for tensor in kept if tensor.numel() == 64 * 48]
    assert [tensor.dtype for tensor in activations] == [E4M3]


def test_a_saved_weight_that_changes_before_backward_is_an_error() -> None:
    layer = convert(make_linear())
    output = layer(random_values(8, 48)).sum()
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def test_state_dict_restores_every_bit() -> None:
    source, target = convert(make_linear(seed=3)), convert(make_linear(seed=4))
    source.gradient_position.count = 7
    buffer = io.BytesIO()
    torch.save(source.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    assert all(type(value) in (Tensor, nn.Parameter) for value in state.values())
    target.load_state_dict(state)
    assert torch.equal(target.weight, source.weight)
    assert torch.equal(target.encoded.dequant_scale, source.encoded.dequant_scale)
    assert target.gradient_position.count == 7


def test_a_copy_trains_like_the_original() -> None:
    layer = convert(make_linear())
    twin = copy.deepcopy(layer)
    for each in (layer, twin):
        each(random_values(8, 48)).sum().backward()
    assert isinstance(twin.weight.grad, Float8Gradient)
    assert twin.gradient_position is not layer.gradient_position
    assert torch.equal(twin.weight.grad.codes.view(torch.uint8), layer.weight.grad.codes.view(torch.uint8))


def test_a_users_autocast_stays_outside_of_products() -> None:
    """Sums of unscaled codes exceed fp16."""
    torch.manual_seed(0)
    model, _ = initialize(nn.Sequential(nn.Linear(256, 64)), opt_level="O2", auto_filter=False)
    input = torch.randn(16, 256)
    with torch.autocast("cpu", dtype=torch.float16):
        output = model(input)
    assert output.dtype == torch.float16
    torch.testing.assert_close(output.float(), model(input), rtol=2.0**-10, atol=2.0**-14)
