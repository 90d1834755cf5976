"""The ops as torch sees them: the implementation for a device, the results that a compiler expects, FLOPs, no aliases."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from octet.worker import kernels
from octet.worker.kernels import LinearFormats, ScaledCodes, ScaleKind, library
from octet.worker.kernels.cuda import language
from octet.worker.kernels.scales import OperandFormat

ops = torch.ops.octet
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def calls(*shapes: tuple[int, int]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """(op, arguments) of every op, with every kind of scale.

    `complete`, `measure`, `quantize_delayed` and ops with a final _ write into their arguments.
    """
    yield from attention_calls()
    for shape in shapes or ((300, 260), (16, 1)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        for kind in (kind.value for kind in ScaleKind):
            codes, scale = ops.quantize(x, E4M3, kind, 0, None)
            yield ops.compute_amax, (x, kind)
            yield ops.quantize, (x, E5M2, kind, 1, None)
            yield ops.quantize, (x, torch.float16, kind, 0, ops.compute_amax(x, kind))
            yield ops.encode, (x, scale, kind, E4M3)
            yield ops.encode, (x.t(), ops.compute_amax(x.t(), kind), kind, E4M3)
            yield ops.dequantize, (codes, scale, kind, torch.bfloat16)
            yield ops.dequantize, (codes, scale, kind, torch.float32)
            for sides in ("rows", "columns", "both"):
                yield ops.quantize_operand, (x, E4M3, kind, 0, sides, None, None)
                yield ops.quantize_operand, (x.t(), E4M3, kind, 0, sides, None, None)
            yield ops.activate_operand, (x, "relu", E4M3, kind, 0, "both", None, None, x)
        for uses_amax in (torch.tensor(True), torch.tensor(False), None):
            yield ops.activate_operand, (x, "relu", E4M3, "tensor", 0, "both", torch.tensor(3.0), uses_amax, None)
            yield ops.quantize_operand, (x, E4M3, "tensor", 0, "both", torch.tensor(3.0), uses_amax)
        for sides in ("rows", "columns", "both"):
            yield from delayed_calls(x, sides)
        for gradient in (x, x.t(), x.bfloat16()):
            yield ops.quantize_gradient, (gradient, E4M3)
        codes, scale = ops.quantize(x, E4M3, "row", 0, None)
        yield ops.matmul, (codes, scale, "row", codes, scale, "row", torch.bfloat16, False)
        for sides in ("rows", "columns", "both"):
            yield from linear_calls(x, sides)
            yield from grouped_calls(x, sides)
        yield ops.measure, (x, codes, scale, "row", None, torch.empty(5))
        yield ops.measure, (x, codes, scale, "row", torch.tensor(0.5), torch.empty(5))
        for is_layer_norm, bias in ((True, x[0] + 1), (False, None)):
            yield ops.normalize, (x, x[0], bias, 1e-5, is_layer_norm, torch.float32)
            yield ops.normalize, (x.t(), x.t()[0].bfloat16(), None, 1e-5, is_layer_norm, torch.bfloat16)
        yield from activation_calls(x)
        yield ops.activate_again, (x, "relu", x + 1)
        yield ops.activate_again, (x.t(), "relu", x)
        yield ops.all_finite, (x,)
        yield ops.sqrt, (x.abs() + 1e-20,)
        yield ops.split_dequantize, (codes, torch.ones_like(codes, dtype=torch.int8), torch.tensor(0.5), torch.bfloat16)
        codes, scale = ops.quantize(x, E4M3, "tensor", 0, None)
        for order in (2.0, float("inf"), 3.0):
            yield ops.norms, ([codes, x, codes[1:]], [scale, x, scale / 2], order)
            yield ops.total_norm, ([codes, x], [scale, x], order)
        yield ops.clip_, ([codes, codes[1:]], [scale, scale / 2], torch.tensor(3.0), 0.5)
        yield ops.clamp_, (codes, scale, [-0.5, 0.25, 0.5], [3, 4, 5])
        yield ops.mean_of_shards, (codes, torch.ones(len(codes)))
        yield ops.accumulate_, (codes, scale, x, 0.5, [3, 4, 5])


def activation_calls(x: Tensor) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Activations with gates and without, their gradients, and codes that are written with values."""
    window = (torch.tensor(3.0), torch.tensor(True))
    yield ops.activate, (x, x + 1, "relu", E5M2, 1, *window)
    for uses_amax, columns in ((True, True), (False, True), (False, False)):
        written = ops.quantize(x, E4M3, "tensor", 0, window[0])[0]
        yield ops.complete, (written, x, x.abs().amax(), 0, window[0], torch.tensor(uses_amax), columns)
    for gated in (None, x + 1):
        yield ops.activate, (x, gated, "relu")
        yield ops.activate, (x.t(), None if gated is None else gated.t(), "relu")
        yield ops.activate_backward, (x.sin(), x, gated, "relu")
        yield ops.activate_backward, (x.t(), x.t(), None if gated is None else gated.t(), "relu")


def delayed_calls(x: Tensor, sides: str) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """By a window that is full and by one that is not; with an amax that is known, and a step that has seen a larger one."""
    for num_finite_steps, step_amax, amax in ((0, 0.0, None), (2, 1.0, None), (2, 0.5, 4.0), (1, 9.0, 4.0)):
        window = (torch.tensor(step_amax), torch.tensor(8.0), torch.tensor(num_finite_steps))
        for given, activation in ((x, None), (x.t(), None), (x, "relu")):
            known = None if amax is None else torch.tensor(amax)
            yield ops.quantize_delayed, (given, *window, known, E4M3, 2, 1, sides, activation, activation is None)


def linear_calls(x_TK: Tensor, sides: str) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """A layer's passes, of values and of codes, of a weight held in fp32, FP16 and FP8, and by each kind of scale."""
    num_tokens, num_in = x_TK.shape
    weight_NK = torch.linspace(-2, 3, 48 * num_in).view(48, num_in)
    grad_output_TN = torch.linspace(-1, 1, num_tokens * 48).view(num_tokens, 48).sin()
    nothing, dtypes = (None, None, None), (torch.bfloat16, torch.float32)
    values, grad = (x_TK, None, None), (grad_output_TN, None, None)
    held = [(weight_NK, None, None)]
    for dtype in (torch.float16, E4M3):
        held.append((*ops.quantize(weight_NK, dtype, "tensor", 0, None), torch.tensor(3.0)))
    for kind in (ScaleKind.TENSOR, ScaleKind.ROW, ScaleKind.BLOCK_1X128):
        formats = LinearFormats(*[OperandFormat(E4M3, kind)] * 3)
        after_relu = replace(formats, activation="relu", margin=1)
        kept = (*ops.quantize_operand(x_TK, E4M3, kind.value, 0, "columns", None, None), None)
        rows = (*ops.quantize_operand(x_TK, E4M3, kind.value, 0, "rows", None, None), None)
        amax = torch.tensor(2.0) if kind is ScaleKind.TENSOR else None
        for weight in held if kind is ScaleKind.TENSOR else held[:1]:
            yield ops.linear_output, (*values, *weight, formats.text, torch.bfloat16, sides)
            yield ops.linear_output, (*values, *weight, after_relu.text, torch.float16, "nothing")
            yield ops.linear_output, (*rows, *weight, formats.text, torch.bfloat16, "nothing")
            weight_KN = (weight[0].t(), *weight[1:]) if weight[0].dtype == E4M3 else weight
            yield ops.linear_gradients, (*grad, *nothing, *kept, *weight_KN, formats.text, sides, *dtypes)
            again = (x_TK, None, amax)
            yield ops.linear_gradients, (*grad, *nothing, *again, *weight_KN, after_relu.text, sides, *dtypes)
    stored_KN = replace(LinearFormats(), is_transposed=True).text
    weight = (weight_NK.t().contiguous(), None, None)
    yield ops.linear_output, (*values, *weight, stored_KN, torch.bfloat16, sides)
    kept = (*ops.quantize_operand(x_TK, E4M3, "tensor", 0, "columns", None, None), None)
    yield ops.linear_gradients, (*grad, *nothing, *kept, *weight, stored_KN, sides, *dtypes)
    codes, scale, codes_t, scale_t = ops.quantize_operand(grad_output_TN, E5M2, "tensor", 0, "both", None, None)
    both = (codes, scale, None, codes_t, scale_t, None)
    if sides == "both":
        yield ops.linear_gradients, (*both, *kept, *held[0], LinearFormats().text, sides, *dtypes)
    elif sides == "columns":  # codes for the columns alone, and no weight
        yield ops.linear_gradients, (*both[3:], *nothing, *kept, *nothing, LinearFormats().text, sides, *dtypes)
    else:
        yield ops.linear_gradients, (*both[:3], *nothing, *nothing, *held[0], LinearFormats().text, sides, *dtypes)


def grouped_calls(x_SK: Tensor, sides: str) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Three layers' passes, one of them without rows, of values and of codes, and of weights held in fp32, FP16 and FP8."""
    num_rows, num_in = x_SK.shape
    counts, nothing, dtypes = [num_rows - 1, 0, 1], (None, None, None), (torch.bfloat16, torch.float32)
    weights = [torch.linspace(-2, 3 + n, 48 * num_in).view(48, num_in) for n in range(3)]
    grad_SN = torch.linspace(-1, 1, num_rows * 48).view(num_rows, 48).sin()
    in_codes = ops.quantize(x_SK, E4M3, "tensor", 0, None)[0]
    held: list[tuple[list[Tensor], ...]] = [(weights, [], [])]
    for dtype in (torch.float16, E4M3):
        made = [ops.quantize(weight, dtype, "tensor", 0, None) for weight in weights]
        held.append(([codes for codes, _ in made], [scale for _, scale in made], [weight.abs().amax() for weight in weights]))
    for data, scales, amaxes in held:
        for is_transposed in (False, True):
            stored = [part.t().contiguous() for part in data] if is_transposed else data
            formats = replace(LinearFormats(), is_transposed=is_transposed).text
            values = (x_SK, None, None), (stored, scales, amaxes)
            output = (*values[0], counts, *values[1], formats, torch.bfloat16, True)
            yield ops.grouped_output, output
            columns = (*ops.grouped_output(*output)[1:3], None)
            known = (stored, scales, amaxes or [weight.abs().amax() for weight in weights])
            yield (
                ops.grouped_gradients,
                (grad_SN, None, None, counts, *columns, *known, formats, sides, not is_transposed, *dtypes),
            )
            yield (
                ops.grouped_output,
                (in_codes, torch.ones(3), None, counts, stored, scales, amaxes, formats, torch.float16, False),
            )
    yield ops.grouped_gradients, (grad_SN, None, None, counts, *nothing, *held[1], LinearFormats().text, "rows", False, *dtypes)
    yield ops.quantize_gradients, (torch.stack(weights), torch.stack([weight.abs().amax() for weight in weights]), E4M3)
    yield ops.sum_runs, (grad_SN, counts)
    yield ops.amax_of_runs, (grad_SN, counts)
    yield ops.amax_of_each, (weights,)


def attention_calls() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Attention of two rows of 8 tokens, with three documents and two query heads for each head of keys."""
    starts = torch.tensor([0, 5, 8, 16], dtype=torch.int32)
    query, key, value = (torch.randn(2, 8, num_heads, 16).transpose(1, 2) for num_heads in (4, 2, 2))
    where = starts, starts, 0.25, 3
    yield ops.document_attention, (query, key, value, *where)
    output, logsumexp = ops.document_attention(query, key, value, *where)
    yield ops.document_attention_backward, (query, [query, key, value], output, logsumexp, *where)


def test_results_are_what_the_compiler_is_told() -> None:
    for op, arguments in calls():
        with FakeTensorMode() as mode:
            told = op(*tree_map_only(Tensor, mode.from_tensor, arguments))
        for real, fake in zip(tree_leaves(op(*arguments)), tree_leaves(told), strict=True):
            if real is None:
                continue
            assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device), op
            strides = zip(real.shape, real.stride(), fake.stride(), strict=True)
            assert all(one == other for size, one, other in strides if size > 1), op


def test_results_share_no_memory() -> None:
    for op, arguments in calls():
        given = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves(arguments) if isinstance(tensor, Tensor)}
        results = [tensor.untyped_storage().data_ptr() for tensor in tree_leaves(op(*arguments)) if tensor is not None]
        assert len(given.union(results)) == len(given) + len(results), op


def one_call_of_each() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The first call of each op with each set of dtypes."""
    seen = set()
    for op, arguments in calls((16, 32)):
        key = (op, *(leaf.dtype for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)))
        if key not in seen:
            seen.add(key)
            yield op, arguments


def assert_torch_accepts(op: Any, arguments: tuple[Any, ...], *checks: str) -> None:
    """Run torch's checks of an op. That of the schema multiplies the arguments, which CPUs cannot with FP8."""
    has_fp8 = any(leaf.dtype in (E4M3, E5M2) for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor))
    checks = ("test_autograd_registration", "test_faketensor", *checks, *(() if has_fp8 else ("test_schema",)))
    torch.library.opcheck(op.default, arguments, test_utils=checks)


def test_torchs_own_checks_of_an_op() -> None:
    for op, arguments in one_call_of_each():
        assert_torch_accepts(op, arguments)


def test_every_op_has_torchs_own_checks() -> None:
    """`sum_over` has them on two ranks, in `tests/worker/mesh/test_in_graph.py`."""
    checked = {op._qualified_op_name for op, _ in one_call_of_each()}
    registered = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("octet::")}
    assert registered - checked <= {"octet::sum_over"}


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
def test_torchs_own_checks_of_an_op_with_dynamic_shapes() -> None:
    """Graphs take no op that writes an argument and returns a list: `quantize_delayed` is for eager code alone."""
    for op, arguments in one_call_of_each():
        if op is not ops.quantize_delayed:
            assert_torch_accepts(op, arguments, "test_aot_dispatch_dynamic")


def test_an_op_writes_what_its_schema_names_alone() -> None:
    for op, arguments in calls((16, 32)):
        is_written = [parameter.is_write for parameter in op.default._schema.arguments]
        before = tree_map_only(Tensor, Tensor.clone, arguments)
        op(*arguments)
        for argument, copied, may_change in zip(arguments, before, is_written, strict=False):
            for one, other in zip(tree_leaves(argument), tree_leaves(copied), strict=True):
                if isinstance(one, Tensor) and not may_change:
                    assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), op


@pytest.mark.system
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter
@pytest.mark.skipif(not language.INTERPRETED.value, reason="missing: Triton's interpreter, TRITON_INTERPRET=1 before the start")
def test_cuda_tensors_get_the_triton_kernels(launched: list[str]) -> None:
    """Run the implementation for CUDA on CPU tensors. It must be a Triton kernel and agree with the reference."""
    on_cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    for op, arguments in calls((16, 130)):
        if op in (
            ops.matmul,
            ops.linear_output,
            ops.linear_gradients,
            ops.grouped_output,
            ops.grouped_gradients,
            ops.quantize_gradients,  # of whose result a part is not written
            ops.sqrt,
            ops.activate_again,
            ops.document_attention,
            ops.document_attention_backward,
        ):  # cuBLAS's, torch's own, that of other ops, and those of test_grouped.py
            continue
        launched.clear()
        twin = tree_map_only(Tensor, Tensor.clone, arguments)
        expected, actual = op(*arguments), op.default.redispatch(on_cuda, *twin)
        assert launched, op
        bounds = {
            ops.norms: (1e-5, 0.0),
            ops.total_norm: (1e-5, 0.0),
            ops.measure: (1e-5, 0.0),
            ops.normalize: (1e-5, 4e-6),
            ops.sum_runs: (1e-5, 1e-5),
        }  # they add in other orders
        rtol, atol = bounds.get(op, (0.0, 0.0))
        pairs = zip(tree_leaves((expected, arguments)), tree_leaves((actual, twin)), strict=True)
        for one, other in pairs:
            if isinstance(one, Tensor):
                torch.testing.assert_close(other.float(), one.float(), rtol=rtol, atol=atol)


class Seen(TorchDispatchMode):
    """Notes the ops that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


CALLS = (kernels.compute_amax, lambda x: torch.ops.octet.compute_amax.directly(x, "tensor"))


@pytest.mark.skipif(not language.INTERPRETED.value, reason="missing: Triton's interpreter, TRITON_INTERPRET=1 before the start")
@pytest.mark.parametrize("call", CALLS, ids=["eager code", "a graph"])
def test_code_on_a_gpu_goes_past_the_dispatcher_unless_somebody_looks(
    monkeypatch: pytest.MonkeyPatch, launched: list[str], call: Callable[[Tensor], Tensor]
) -> None:
    """With the CPU in a GPU's place, the kernel runs; a dispatch mode still sees the op, and the CPU's implementation runs."""
    monkeypatch.setattr(library, "runs_directly", lambda tensor: tensor.is_cpu)
    x = torch.tensor([1.0, -3.0])
    assert float(call(x)) == 3
    assert launched == ["_amax_flat"]
    with Seen() as seen:
        assert float(call(x)) == 3
    assert "octet.compute_amax.default" in seen.names
    assert launched == ["_amax_flat"]


@pytest.mark.system
def test_registering_ops_loads_no_triton() -> None:
    program = (
        "import sys, torch, octet.worker.kernels as k, octet.worker.fp8.linear; k.quantize(torch.ones(4), torch.float8_e4m3fn);"
        "print('triton' in sys.modules, 'octet.worker.kernels.cuda' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "False False\n"


@pytest.mark.parametrize("shape", [(5, 40, 33), (128, 256, 64)])
def test_a_product_counts_two_flops_for_each_multiplication(shape: tuple[int, int, int]) -> None:
    num_rows, num_summed, num_out = shape
    ones = (torch.ones(num_rows, num_summed), torch.ones(num_out, num_summed))
    a, b = (ScaledCodes(*kernels.quantize(x, E4M3), ScaleKind.TENSOR) for x in ones)
    kernels.count_flops()
    with FlopCounterMode(display=False) as counter:
        kernels.matmul(a, b)
    assert counter.get_total_flops() == 2 * num_rows * num_summed * num_out
