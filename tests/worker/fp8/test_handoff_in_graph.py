"""Compiled blocks find amaxes, and write codes, where tensors are made: the bits are those of before, in fewer passes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn

from octet.worker import initialize, kernels
from octet.worker.fp8 import handoff, operand
from octet.worker.fp8.accelerator import cpu_as_accelerator
from octet.worker.fp8.handoff import amax_in_graph, codes_in_graph
from octet.worker.prepare.blocks import checkpoint_blocks
from octet.worker.prepare.residual_stream import keep_residual_in_bf16
from tests.worker.fp8.test_handoff import DELAYED, gpt, llama

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # Dynamo's own doing
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def hard_values(dtype: torch.dtype) -> Tensor:
    """Values of many sizes, zeros, what is not finite, and what is not finite in bf16."""
    values = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 64)[:, None]
    values[1], values[2, :4] = 0.0, torch.tensor([torch.nan, torch.inf, -torch.inf, 3.4e38])
    return values.to(dtype)


@pytest.mark.parametrize("codes_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0.0, 1e-3, 17.0, torch.inf])
def test_codes_are_those_that_kernels_write(dtype: torch.dtype, codes_dtype: torch.dtype, window: float) -> None:
    x, amax = hard_values(dtype), torch.tensor(window)
    expected = kernels.quantize(x, codes_dtype, margin=1, amax=amax)[0]
    found = codes_in_graph(x, kernels.KnownScale(codes_dtype, 1, amax, torch.tensor(True)))
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_bf16_is_rounded_where_a_compiler_holds_more() -> None:
    """Inductor takes a cast to bf16 and back for nothing: it would hand on the fp32 values that were written as bf16."""
    wide = hard_values(torch.float32)
    stored = wide.bfloat16()
    with mock.patch.object(Tensor, "float", lambda x: wide if x is held else x.to(torch.float32)):
        held = stored.detach()
        with mock.patch.object(Tensor, "detach", return_value=held):
            found = codes_in_graph(stored, kernels.KnownScale(E4M3, 0, torch.tensor(17.0), torch.tensor(True)))
    expected = kernels.quantize(stored, E4M3, amax=torch.tensor(17.0))[0]
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_eager_passes_look_for_nothing_twice() -> None:
    assert amax_in_graph(torch.ones(4, 4)) is None


@contextmanager
def nothing_in_graphs() -> Iterator[None]:
    """Inside, compiled graphs are made as before: our ops look for amaxes, and no codes are written ahead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handoff, "amax_in_graph", lambda *_x: None)
        patch.setattr(operand, "amax_in_graph", kernels.compute_amax)
        yield


class Graphs:
    """A backend that runs what AOTAutograd makes, and keeps the ops of its graphs with their arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Any:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        return aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep, partition_fn=min_cut_rematerialization_partition)(
            module, inputs
        )

    def _keep(self, module: fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        from functorch.compile import make_boxed_func

        for node in module.graph.nodes:
            if node.op == "call_function":
                name = str(node.args[0]) if "auto_functionalized" in str(node.target) else str(node.target)
                self.calls.append((name.removeprefix("octet.").removesuffix(".default"), node.args))
        return make_boxed_func(module.forward)

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [args for called, args in self.calls if called == name]


def train(
    make: Callable[[], nn.Module], kind: Any, *, level: str, recipe: dict[str, Any], compiled: bool = True
) -> tuple[list[Tensor], Graphs]:
    """Outputs, gradients and what scaling remembers, of four steps of a block; and what was compiled in them."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, _ = initialize(make(), None, level, recipe=recipe, statistics_every=3, auto_filter=False)
    checkpoint_blocks(model, kind)
    (block,), graphs, found = model.blocks, Graphs(), []
    if compiled:
        block.compile(dynamic=False, fullgraph=True, backend=graphs)
    turns = (torch.ones(16, 16), torch.zeros(16, 16))
    for step in range(4):
        x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(step)).requires_grad_()
        output = block(x, turns) if make is llama else block(x)
        (output.float() * torch.linspace(-1, 2, 32)).sum().backward()
        model.octet_report.health.after_step()
        found += [output.detach(), x.grad, *(parameter.grad + 0 for parameter in block.parameters())]
        for parameter in block.parameters():
            parameter.grad = None
    return [*found, *block.buffers()], graphs


@pytest.mark.parametrize(
    ("make", "level", "recipe", "kind"),
    [
        pytest.param(llama, "O2", {}, "none", marks=pytest.mark.system),
        pytest.param(gpt, "te", DELAYED, "selective", marks=pytest.mark.system),
        pytest.param(gpt, "te", {}, "none", marks=pytest.mark.system),  # its amax waits for the backward pass
        *(
            pytest.param(make, level, recipe, kind, marks=pytest.mark.matrix)
            for make in (llama, gpt)
            for level in ("te", "O2", "O3-split")
            for recipe in ({}, DELAYED)
            for kind in ("none", "selective", "full")
        ),
    ],
)
@pytest.mark.parametrize("is_accelerator", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_compiled_blocks_have_the_bits_of_before(
    make: Callable[[], nn.Module], level: str, recipe: dict[str, Any], kind: str, is_accelerator: bool
) -> None:
    with cpu_as_accelerator() if is_accelerator else nullcontext():
        found, graphs = train(make, kind, level=level, recipe=recipe)
        with nothing_in_graphs():
            expected, before = train(make, kind, level=level, recipe=recipe)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert bool(graphs.of("complete")) == bool(recipe)
    assert not before.of("complete")
    assert graphs.of("linear_output")
    assert graphs.of("linear_gradients")
    if not recipe:  # each operand is in codes (its second part), or its amax is known (its third)
        operands = [args[:3] for args in (*graphs.of("linear_gradients"), *graphs.of("linear_output"))]
        assert all(scale is not None or amax is not None for _, scale, amax in operands)
        assert all(args[5] is not None for args in graphs.of("quantize_operand"))


@pytest.mark.system
@pytest.mark.parametrize("products", [("grad_weight",), ("output", "grad_weight")])
@pytest.mark.parametrize("statistics_every", [0, 1])
def test_an_input_in_bf16_waits_as_it_is_for_products_in_bf16(products: tuple[str, ...], statistics_every: int) -> None:
    """A cast that changes nothing would be an alias of the input, which Dynamo does not hand to the backward pass."""
    found = []
    for is_compiled in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        with cpu_as_accelerator():
            options: dict[str, Any] = {"statistics_every": statistics_every, "auto_filter": False}
            model, _ = initialize(gpt(), None, "te", recipe={"high_precision_gemms": products}, **options)
            keep_residual_in_bf16(model)
            (block,) = model.blocks
            if is_compiled:
                block.compile(dynamic=False, fullgraph=True, backend="aot_eager")
            x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
            block(x).float().square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in block.parameters())])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled.float(), eager.float(), rtol=2e-2, atol=1e-2 * float(eager.abs().max()))
