"""Runs the host's side of a GPU step on a CPU: tiny tensors of real memory, and Triton launches that do nothing.

torch's own ops run as they are; at these sizes they cost about what issuing them costs. Only matrix products would cost more:
those of bf16 take 20 to 25 us of a CPU. They, and the products of FP8, go through torch's dispatcher and allocate their result,
at every level alike. Our ops run the code that they run on a Hopper GPU, down to Triton's launcher, which finds a compiled
kernel that does nothing. What is left is the time of the host.
(`gpu/fake_gpu.py` runs the same code on fake tensors, which have any size, and whose own Python takes most of the time.)
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
    """num_launches: of Triton kernels."""

    num_launches = 0

    def run(self, _compiled: _Compiled, *_arguments: Any) -> None:
        """Take the place of a compiled kernel's `run`."""
        self.num_launches += 1


def _do_compile(kernel: Any, key: str, _signature: Any, device: int, *_options: Any) -> _Compiled:
    compiled = kernel.device_caches[device][0][key] = _Compiled()
    return compiled


def _product(a: Tensor, b: Tensor) -> Tensor:
    return torch.empty(a.shape[0], b.shape[1], dtype=a.dtype)


def _float8_product(
    a: Tensor,
    b: Tensor,
    _scale_a: Tensor,
    _scale_b: Tensor,
    _bias: Tensor | None = None,
    _scale_result: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    _use_fast_accum: bool = False,
) -> Tensor:
    return torch.empty(a.shape[0], b.shape[1], dtype=out_dtype)


def _product_and_sum(_sum: Tensor, a: Tensor, b: Tensor, **_options: Any) -> Tensor:
    return _product(a, b)


def _into(*_operands: Tensor, out: Tensor, **_options: Any) -> Tensor:
    return out


_PRODUCTS = {
    "mm": _product,
    "addmm": _product_and_sum,
    "_scaled_mm": _float8_product,
    "mm.out": _into,
    "addmm.out": _into,
    "_scaled_mm.out": _into,
}
"""The replacements of torch's products, by name. Compiled blocks call those that write into a tensor."""


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
            for name, replacement in _PRODUCTS.items():
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
