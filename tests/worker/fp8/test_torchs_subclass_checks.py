"""torch's own checks of tensor subclasses and of ops, on a weight that is held as codes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.optests import aot_autograd_check
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass, transform_subclass

from octet.worker import initialize
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.rounding_position import RoundingPosition
from octet.worker.fp8.weight import Float8Weight

aten = torch.ops.aten
SHAPE = (16, 32)
STORAGES = {"fp16": (torch.float16, False), "e4m3": (torch.float8_e4m3fn, False), "e4m3+int8": (torch.float8_e4m3fn, True)}
in_matrix = [pytest.param(name, marks=pytest.mark.matrix) for name in STORAGES]
CHECKS = tuple(
    f"test_{name}" for name in ("schema", "autograd_registration", "faketensor", "aot_dispatch_static", "aot_dispatch_dynamic")
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight_of(storage: str, *, requires_grad: bool = False) -> Float8Weight:
    dtype, has_residual = STORAGES[storage]
    weight = Float8Weight.encode(random(*SHAPE), dtype, has_residual=has_residual)
    weight.requires_grad_(requires_grad)
    return weight


class Seen(TorchDispatchMode):
    """Names the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, (Float8Gradient, Float8Weight)) for kind in types):
            return NotImplemented  # it runs on plain tensors, and these come back here
        self.ops.add(str(func))
        return func(*args, **(kwargs or {}))


OPS: dict[str, Callable[[Any], tuple[Any, tuple[Any, ...]]]] = {
    "detach": lambda made: (aten.detach.default, (made(),)),
    "alias": lambda made: (aten.alias.default, (made(),)),
    "clone": lambda made: (aten.clone.default, (made(),)),
    "a cast": lambda made: (aten.to.dtype, (made(), torch.float64)),
    "new zeros": lambda made: (aten.new_zeros.default, (made(), [4, 4])),
    "a sum": lambda made: (aten.add.Tensor, (made(), random(*SHAPE))),
    "a product": lambda made: (aten.mm.default, (random(4, SHAPE[0]), made())),
    "a norm": lambda made: (aten.linalg_vector_norm.default, (made(),)),
    "a foreach norm": lambda made: (aten._foreach_norm.Scalar, ([made(), random(3)],)),
    "transposed": lambda made: (aten.t.default, (made(),)),
    "viewed": lambda made: (aten.view.default, (made(), [32, 16])),
    "sliced": lambda made: (aten.slice.Tensor, (made(), 0, 1, 3)),
    "split": lambda made: (aten.split.Tensor, (made(), 8)),
    "mul_": lambda made: (aten.mul_.Tensor, (made(), torch.tensor(1.5))),
    "lerp_": lambda made: (aten.lerp_.Scalar, (made(), random(*SHAPE), 0.5)),
    "copy_ of values": lambda made: (aten.copy_.default, (made(), random(*SHAPE))),
    "copy_ of a weight": lambda made: (aten.copy_.default, (made(), made())),
    "fill_": lambda made: (aten.fill_.Scalar, (made(), 0.5)),
    "zero_": lambda made: (aten.zero_.default, (made(),)),
    "foreach mul_": lambda made: (aten._foreach_mul_.Scalar, ([made(), random(3)], 2.0)),
}
"""Ops of torch with a weight: those that take its parts, others, views, and writes."""
OF_GRADIENTS = ("a sum", "a product", "a norm", "transposed", "viewed")


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("storage", STORAGES)
def test_torch_accepts_each_op_with_a_weight(storage: str, name: str) -> None:
    """Schemas, fake tensors, and graphs of static and dynamic shapes, as eager."""
    for requires_grad in (False, True) if name in OF_GRADIENTS else (False,):
        op, arguments = OPS[name](lambda requires_grad=requires_grad: weight_of(storage, requires_grad=requires_grad))
        torch.library.opcheck(op, arguments, test_utils=CHECKS)


@pytest.mark.parametrize("storage", STORAGES)
def test_its_parts_are_taken_apart_and_put_together(storage: str) -> None:
    weight = weight_of(storage)
    assert is_traceable_wrapper_subclass(weight)
    seen: list[str] = []

    def part_of(name: str, part: Tensor) -> Tensor:
        seen.append(name)
        assert type(part) is Tensor
        return part.clone()

    for source in (weight, weight[3:7], weight.t()):
        again = transform_subclass(source, part_of)
        assert type(again) is Float8Weight
        assert (again.shape, again.stride(), again.dtype) == (source.shape, source.codes.clone().stride(), torch.float32)
        assert torch.equal(again + 0, source + 0)
        with torch.no_grad():
            again.mul_(2)
        assert torch.equal(again + 0, 2 * (source + 0))  # which did not change
    assert seen[: len(seen) // 3] == ["codes", "dequant_scale", "values_amax", "residual"][: 4 if storage == "e4m3+int8" else 3]


@pytest.mark.parametrize("storage", STORAGES)
def test_a_fake_of_it_is_a_weight_of_fake_parts(storage: str) -> None:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(weight_of(storage))
        assert type(fake) is Float8Weight
        assert type(fake.codes) is type(fake.dequant_scale) is FakeTensor
        assert type(fake.t()) is Float8Weight
        assert (fake + 1).shape == SHAPE
        with torch.no_grad():
            assert fake.mul_(2) is fake
        assert type(fake.clone()) is FakeTensor


@pytest.mark.parametrize("storage", STORAGES)
def test_other_subclasses_meet_its_values(storage: str) -> None:
    """torch's TwoTensor runs each op twice."""
    weight, x = weight_of(storage), random(4, SHAPE[1])
    both = TwoTensor(x, 2 * x)
    product = both @ weight.t()
    assert type(product) is TwoTensor
    assert torch.equal(product.a, x @ (weight + 0).t())
    assert torch.equal(product.b, 2 * x @ (weight + 0).t())
    assert torch.equal((weight + TwoTensor(random(*SHAPE), random(*SHAPE))).a, weight + random(*SHAPE))


@pytest.mark.parametrize("level", ["O2", "O3", pytest.param("O3-split", marks=pytest.mark.matrix)])
def test_a_product_decodes_nothing(level: str) -> None:
    """No op that the dispatcher sees reads a weight's values."""
    model, _ = initialize(nn.Sequential(nn.Linear(32, 32)), None, level, convert_heads=True, statistics_every=0)
    with Seen() as seen:
        model(random(4, 32)).sum().backward()
    assert "octet.linear_output.default" in seen.ops
    assert not {"octet.dequantize.default", "octet.split_dequantize.default"}.intersection(seen.ops)
    with Seen() as seen:
        assert (model[0].weight + 0).any()
    assert {"octet.dequantize.default", "octet.split_dequantize.default"}.intersection(seen.ops)


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("storage", in_matrix)
def test_graphs_are_made_once_for_all_numbers_of_rows(storage: str) -> None:
    def use(weight: Tensor, x: Tensor) -> Tensor:
        return x @ weight.t() + weight[2:4].norm() + weight.clone().sum()

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(use, backend=counter, fullgraph=True, dynamic=True)
    weight = weight_of(storage)
    for num_rows in (4, 8, 15):
        x = random(num_rows, SHAPE[1])
        assert torch.equal(compiled(weight, x), use(weight, x))
    assert counter.frame_count == 1


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("storage", STORAGES)
def test_autograd_of_graphs_is_that_of_eager(storage: str, dynamic: bool) -> None:
    def use(weight: Tensor, x: Tensor) -> Tensor:
        return (x @ weight.t()).square() + weight.view(-1)[3:19].sum()

    aot_autograd_check(use, (weight_of(storage, requires_grad=True), random(4, SHAPE[1]).requires_grad_()), {}, dynamic=dynamic)


def test_a_gradient_is_taken_apart_and_put_together() -> None:
    gradient = Float8Gradient.quantize(random(*SHAPE), RoundingPosition(0, 0))
    again = transform_subclass(gradient, lambda _name, part: part.clone())
    assert type(again) is Float8Gradient
    again.mul_(2.0)
    assert torch.equal(again + 0, 2 * (gradient + 0))
