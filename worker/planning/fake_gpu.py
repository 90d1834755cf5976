"""A fake GPU without memory or arithmetic: tensors are fake and kernels are not launched; everything else runs as on CUDA.

torch's fake tensors have shapes, dtypes and storages without bytes. If torch is built without CUDA, autograd refuses fake
CUDA tensors. They are therefore on a device type that torch lets us define ("gpu"), and checks for CUDA return true. The host
code of our Triton kernels runs unchanged and allocates what it allocates on a GPU.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import bias as biases
from torch.utils._foreach_utils import _foreach_supported_types
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend
from triton import knobs
from triton.runtime.jit import JITFunction

from octet.worker.fp8 import norm_forward, norms
from octet.worker.fp8.convert import filter_layers
from octet.worker.fp8.speedups import Chip
from octet.worker.kernels import library
from octet.worker.kernels.cuda import gemm, tables
from octet.worker.models import context
from octet.worker.optim.fused import FusedStep
from octet.worker.planning.fakes import Fakes
from octet.worker.prepare import convert

aten = torch.ops.aten
DEVICE_TYPE = "gpu"
HOPPER, CUDA_VERSION = (9, 0), (13, 0)
_AUTOCAST: list[torch.library.Library] = []  # a library that is freed takes its kernels back
_SILU: list[torch.library.Library] = []
CHIP = Chip("NVIDIA H200", HOPPER)
LOWER_RIGHT = object()
"""Stands for torch's causal mask of the last queries, which no fake tensor can be and which takes no memory on CUDA."""


class _Backend(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: object = None) -> Tensor:
        """Return no state: nothing is drawn. `torch.random.fork_rng` asks every device of the process for one."""
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        """Take back no state."""


@functools.cache
def device() -> torch.device:
    """Register and return the device. The registration lasts for the rest of the process.

    Its autocast casts nothing: layers in 16 bits cast by themselves, and what CUDA's autocast computes in fp32 is in fp32 here.
    """
    _setup_privateuseone_for_python_backend(DEVICE_TYPE, _Backend())
    _AUTOCAST.append(torch.library.Library("_", "IMPL"))
    _AUTOCAST[0].fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _SILU.append(torch.library.Library("aten", "IMPL"))
    _SILU[0].impl("silu_backward", lambda grad, _x: torch.empty_like(grad), "PrivateUse1")  # one kernel on CUDA, seven ops here
    library.run_triton_on("PrivateUse1")
    return torch.device(DEVICE_TYPE, 0)


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Make all tensors inside the context fake, on whatever device."""
    with ExitStack() as stack:
        for owner, name, replacement in (
            (Tensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata),
            (nn.Module, "to_empty", _to_empty),
            (nn.init, "_no_grad_trunc_normal_", lambda tensor, *_args, **_options: tensor),  # it loops on the drawn values
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.enter_context(Fakes())
        yield


@contextmanager
def fake_gpu() -> Iterator[torch.device]:
    """Make all tensors inside the context fake; treat those on the yielded device as CUDA tensors."""
    if knobs.runtime.interpret:
        raise RuntimeError("Triton is set to interpret kernels, but here kernels must not run. Unset TRITON_INTERPRET.")
    fake = device()
    with ExitStack() as stack:
        for owner, name, replacement in (
            (JITFunction, "run", lambda *_args, **_options: None),
            (gemm, "platform", lambda _device: (HOPPER, CUDA_VERSION)),
            (
                convert,
                "filter_layers",
                lambda model, names, rules, tokens, _: filter_layers(model, names, rules, tokens, CHIP),
            ),
            (FusedStep, "_send", _send),
            (tables, "send", _sent),
            (Tensor, "is_cuda", property(lambda tensor: tensor.device.type == DEVICE_TYPE)),
            (nn.functional, "scaled_dot_product_attention", attention),
            (biases, "causal_lower_right", lambda *_sizes: LOWER_RIGHT),
            (context, "can_use_flash_attention", lambda params: params.query.dtype.itemsize == 2),
            (norms, "why_kept", _on_real_tensors(norms.why_kept)),
            (norm_forward, "why_kept", _on_real_tensors(norms.why_kept)),
            (torch.cuda, "get_device_capability", lambda *_device: HOPPER),  # a broadcast asks for it
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.enter_context(fake_tensors())
        stack.enter_context(foreach_takes_fakes())
        yield fake


@contextmanager
def foreach_takes_fakes() -> Iterator[None]:
    """Let torch's clipping and optimizers take lists of fake tensors at once, as lists of real ones on CUDA."""
    _foreach_supported_types.append(FakeTensor)
    try:
        yield
    finally:
        _foreach_supported_types.remove(FakeTensor)


def see_within(mode: TorchDispatchMode, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Handle ops for a mode: run our own as on a device, under the mode, answer reads by the host, leave the rest to torch."""
    if func.namespace == "octet":
        with mode:
            return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1), *args, **options)
    if func is aten._efficient_attention_backward.default:  # torch's fake of it lacks an argument
        with mode:
            return *map(torch.empty_like, args[1:4]), torch.empty_like(args[0][0, 0, 0, 0])
    if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:  # whose experts torch multiplies one by one
        with mode:
            return _grouped_product(args[0], args[1], args[2] if len(args) > 2 else options["offs"])
    return answer_host(mode, func, args, options)


def _grouped_product(left: Tensor, right: Tensor, ends_E: Tensor) -> Tensor:
    """Allocate the products of groups: of rows if both are not divided by their inner dimension, else a matrix of each."""
    groups = (len(ends_E),) if left.dim() == right.dim() == 2 else left.shape[:-2]
    return left.new_empty(*groups, left.shape[-2], right.shape[-1])


def answer_host(_mode: TorchDispatchMode, func: Any, args: tuple[Any, ...], _options: dict[str, Any]) -> Any:
    """Return True or 1 when the host reads a value of a fake tensor, and that two are close."""
    if func is aten.allclose.default:
        return True
    return args[0].dtype == torch.bool or 1 if func is aten._local_scalar_dense.default else NotImplemented


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Run what torch runs on CUDA: flash attention for 16 bits without a mask, else memory-efficient attention."""
    scale = options.get("scale")
    if torch.is_autocast_enabled(DEVICE_TYPE):  # which casts the operands of attention on CUDA
        query, key, value = (each.to(torch.get_autocast_dtype(DEVICE_TYPE)) for each in (query, key, value))
    if attn_mask is LOWER_RIGHT:
        attn_mask, is_causal = None, True
    if attn_mask is None and query.dtype.itemsize == 2:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    bias = attn_mask
    if bias is not None:
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
    if key.shape[1] != query.shape[1]:  # fp32 heads that share keys: torch has no kernel, and holds the products of all tokens
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
        return aten._scaled_dot_product_attention_math(query, key, value, bias, dropout_p, is_causal, scale=scale)[0]
    needs_gradient = query.requires_grad
    run = aten._scaled_dot_product_efficient_attention
    return run(query, key, value, bias, needs_gradient, dropout_p, is_causal, scale=scale)[0]


def _send(step: FusedStep, name: Any, content: Any, on: torch.device, rows: Callable[[Any], Any], dtype: torch.dtype) -> Tensor:
    """Allocate the table on the device with its right size. Later calls return the first table."""
    if (name, on) not in step.sent:
        step.sent[name, on] = (None, _sent(name, content, on, dtype, rows))
    return step.sent[name, on][1]


def _sent(_name: Any, content: Any, on: torch.device, dtype: torch.dtype, rows: Callable[[Any], Any] = list) -> Tensor:
    """Allocate a table without its values, which are a row for each of some 100,000 chunks."""
    table = rows(content)
    return torch.empty(len(table), len(table[0]), dtype=dtype, device=on)


def _on_real_tensors(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compares values of small tensors that it makes, with none of them fake."""

    def run(*args: Any) -> Any:
        with _disable_current_modes():
            return func(*args)

    return run


def _to_empty(model: nn.Module, *, device: torch.device) -> nn.Module:
    """Do as torch's `to_empty`, which cannot swap one fake tensor for another."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty_like(parameter, device=device)))
    return model
