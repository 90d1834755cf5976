"""Runs the host's side of a GPU step on a CPU: tiny tensors of real memory, and launches that do nothing.

What each stands for, at every level alike:

    torch's other ops    run as they are; at these sizes they cost about what issuing them costs
    products, attention  go through torch's dispatcher and allocate their results; computed, a product would take 20 us, the
                         attention of a block 215 us
    foreach ops          of clipping and AdamW are one call each, as their few launches are; a CPU runs an op for each tensor
    our ops              run the code that they run on a Hopper GPU, down to the launch of a compiled kernel, which does nothing
    compiled blocks      are Inductor's for Triton, as on a GPU (`triton_blocks`), down to the same launch; Inductor's C++ for a
                         CPU would join kernels that a GPU launches one by one, 12 in the place of a bf16-amp block's 29

What the driver takes for a launch is left out. (`gpu/fake_gpu.py` runs the same code on fake tensors, which have any size, and
whose own Python takes most of the time.)
"""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from octet.worker.fp8.accelerator import cpu_as_accelerator
from octet.worker.kernels import library
from octet.worker.kernels.cuda import gemm, launching

HOPPER, CUDA_VERSION = (9, 0), (13, 0)


class _Driver:
    """Tells Triton's launcher of one Hopper GPU."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return -1  # which is a CPU tensor's

    def get_current_stream(self, _device: int) -> int:
        return 0


class _Compiled:
    """A compiled kernel whose launch does nothing."""

    function, packed_metadata = 0, ()

    def launch_metadata(self, *_arguments: Any) -> None:
        pass

    def run(self, *_arguments: Any) -> None:
        pass


class Launches:
    """num_launches: of Triton kernels, ours and Inductor's."""

    num_launches = 0

    def run(self, _compiled: _Compiled, *_arguments: Any) -> None:
        """Take the place of a compiled kernel's `run`."""
        self.num_launches += 1


def _do_compile(kernel: Any, key: str, _signature: Any, device: int, *_options: Any) -> _Compiled:
    compiled = kernel.device_caches[device][0][key] = _Compiled()
    return compiled


_empty = torch._C._dynamo.guards._empty_strided_cpu  # as quick as an allocation in C++, where torch's ops allocate
_BF16, _FP32 = torch.bfloat16, torch.float32


def _product(a: Tensor, b: Tensor) -> Tensor:
    (num_rows, _), (_, num_columns) = a.shape, b.shape
    return _empty((num_rows, num_columns), (num_columns, 1), a.dtype)


def _float8_product(
    a: Tensor,
    b: Tensor,
    _scale_a: Tensor,
    _scale_b: Tensor,
    _bias: Tensor | None = None,
    _scale_result: Tensor | None = None,
    out_dtype: torch.dtype = _BF16,
    _use_fast_accum: bool = False,
) -> Tensor:
    (num_rows, _), (_, num_columns) = a.shape, b.shape
    return _empty((num_rows, num_columns), (num_columns, 1), out_dtype)


def _product_and_sum(_sum: Tensor, a: Tensor, b: Tensor, **_options: Any) -> Tensor:
    return _product(a, b)


def _attention(query: Tensor, _key: Tensor, _value: Tensor, *_options: Any, **_more: Any) -> tuple[Tensor, Tensor]:
    batch, num_heads, num_tokens, width = query.shape
    strides = num_tokens * num_heads * width, width, num_heads * width, 1  # heads beside each other in each token
    logsumexp = _empty((batch, num_heads, num_tokens), (num_tokens * num_heads, 1, num_heads), _FP32)
    return _empty((batch, num_heads, num_tokens, width), strides, query.dtype), logsumexp


def _attention_backward(
    _grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_saved: Any, **_options: Any
) -> tuple[Tensor, ...]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _norms(tensors: list[Tensor], *_options: Any, **_more: Any) -> list[Tensor]:
    return list(_empty((len(tensors),), (1,), _FP32).unbind())


def _in_place(*_operands: Any) -> None:
    pass


def _into(*_operands: Tensor, out: Tensor, **_options: Any) -> Tensor:
    return out


_REPLACED = {
    "mm": _product,
    "addmm": _product_and_sum,
    "_scaled_mm": _float8_product,
    "mm.out": _into,
    "addmm.out": _into,
    "_scaled_mm.out": _into,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_foreach_norm.Scalar": _norms,
    "_foreach_mul_.Tensor": _in_place,
    "_foreach_add_.Scalar": _in_place,
}
"""The replacements of torch's ops, by name. Compiled blocks call those products that write into a tensor."""


@contextmanager
def stubbed_launches() -> Iterator[None]:
    """Inside, models on the CPU take the way of a GPU and their kernels do nothing, so that no result means anything."""
    if knobs.runtime.interpret:
        raise RuntimeError("Triton is set to interpret kernels, but here kernels must not run. Unset TRITON_INTERPRET.")
    with ExitStack() as stack:
        ops = torch.library.Library("octet", "IMPL")
        stack.callback(ops._destroy)
        library.run_triton_on("CPU", ops)
        products = torch.library.Library("aten", "IMPL")
        stack.callback(products._destroy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of what it is asked to override
            for name, replacement in _REPLACED.items():
                products.impl(name, replacement, "CPU", allow_override=True)
        for owner, name, replacement in (
            (JITFunction, "_do_compile", _do_compile),
            (gemm, "platform", lambda _device: (HOPPER, CUDA_VERSION)),
            (torch, "_fused_adamw_", lambda *_arguments, **_options: None),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.enter_context(mock.patch.object(driver, "_active", _Driver()))
        stack.enter_context(mock.patch.dict(launching.COMPILED, clear=True))
        stack.enter_context(mock.patch.object(library, "runs_directly", attrgetter("is_cpu")))
        stack.enter_context(cpu_as_accelerator())
        yield


@contextmanager
def triton_blocks() -> Iterator[None]:
    """Inside, and inside of `stubbed_launches`, torch.compile makes Triton kernels for the CPU, which do nothing."""
    from torch._inductor import async_compile, config

    def launch(*arguments: Any, stream: int) -> None:
        _Compiled.run(*arguments)

    def kernel_of(_compiler: Any, name: str, source: str, device_str: str = "cuda") -> Any:
        kernel = async_compile._load_triton_kernel_from_source(name, source)
        kernel._cached_launcher = launch  # Inductor keeps one after the first launch, and its `run` calls it
        return kernel

    with config.patch(cpu_backend="triton"), mock.patch.object(async_compile.AsyncCompile, "triton", kernel_of):
        yield


@contextmanager
def counted_launches() -> Iterator[Launches]:
    """Inside, and inside of `stubbed_launches`, count what is launched."""
    launches = Launches()
    with (
        mock.patch.object(_Compiled, "run", lambda *arguments: launches.run(*arguments)),
        mock.patch.dict(launching.COMPILED, clear=True),  # its entries hold the method that is replaced
    ):
        yield launches


@contextmanager
def as_cuda_tensors() -> Iterator[None]:
    """Inside, `Tensor.is_cuda` is true, as what an optimizer asks for. Not around what torch compiles."""
    with mock.patch.object(Tensor, "is_cuda", property(lambda _tensor: True)):
        yield
