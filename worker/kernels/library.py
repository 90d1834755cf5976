"""How our kernels become ops of torch, `torch.ops.octet.*`: one op for all devices, each device with its implementation.

torch.library chooses by dispatch key: `reference.py` on a CPU, `worker.kernels.cuda` on a CUDA device, loaded when the first
tensor there asks for it (registering loads no Triton). A graph of torch.compile holds the ops as they are. Eager code on a CUDA
device calls the implementation itself, unless a mode, a transform or autograd has to see the op.
Ops take tensors, numbers and strings; our functions take `ScaleKind` and `ScaledCodes` too. This file alone translates: in a
signature `Kind kind` stands for `str kind`, `ScaledCodes a` for `Tensor a, Tensor a_dequant_scale, str a_kind`.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from worker.kernels import reference
from worker.kernels.scales import ScaledCodes, ScaleKind

Function = Callable[..., Any]

_OURS = frozenset({"Kind", "ScaledCodes"})
_KINDS = {kind.value: kind for kind in ScaleKind}
_LIBRARY = torch.library.Library("octet", "FRAGMENT")
_num_dispatch_modes, _num_function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transform, _is_grad_enabled = torch._C._functorch.peek_interpreter_stack, torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
DIRECT_DEVICES = {"cuda"}
"""Types of devices on which eager code calls our implementations without torch's dispatcher."""
_ON_DEVICE: dict[str, Function] = {}
"""By the op's name, what runs the Triton implementation."""


def define(
    signature: str, fake: Function, around: Callable[[Function], Function] = lambda run: run, twins: ModuleType = reference
) -> Function:
    """Register `reference.NAME` and `cuda.NAME` as the op `octet::NAME`; returns the function that calls the op.

    signature: of torch.library, with the two types above. fake: the shapes, strides and dtypes of the results, for a compiler.
    around: what each implementation is wrapped in. twins: the module in the place of `reference`. Results are new tensors;
    callers have checked the arguments.
    """
    name = signature.partition("(")[0]
    types = _parameter_types(signature)

    @cache
    def implementation() -> Function:
        return around(getattr(import_module("worker.kernels.cuda"), name))

    def on_device(*arguments: Any) -> Any:
        return implementation()(*arguments)

    _ON_DEVICE[name] = _packed(on_device, types)
    call = _define(signature, fake)
    _LIBRARY.impl(name, _packed(around(getattr(twins, name)), types), "CPU")
    _LIBRARY.impl(name, _ON_DEVICE[name], "CUDA")

    def call_directly(*arguments: Any) -> Any:
        if not _is_compiling() and _is_plain(arguments[0]):
            return implementation()(*arguments)
        return call(*arguments)

    return call_directly


def _is_plain(argument: Any) -> bool:
    """Whether torch's dispatcher would do nothing but call the implementation of CUDA devices, at the cost of a launch."""
    if type(argument) is not Tensor and isinstance(argument, (ScaledCodes, list)) and argument:
        argument = argument[0]
    return (
        type(argument) is Tensor
        and argument.device.type in DIRECT_DEVICES
        and not (argument.requires_grad and _is_grad_enabled())
        and not _num_dispatch_modes()
        and not _num_function_modes()
        and _transform() is None
    )


def define_composite(signature: str, run: Function, fake: Function) -> Function:
    """Register one function as an op of all devices; returns the function that calls the op."""
    call = _define(signature, fake)
    _LIBRARY.impl(signature.partition("(")[0], _packed(run, _parameter_types(signature)), "CompositeExplicitAutograd")
    return call


def run_triton_on(dispatch_key: str, ops: torch.library.Library | None = None) -> None:
    """Run the implementations of CUDA devices for another of torch's dispatch keys too.

    ops: a library "octet" that overrides implementations as long as it lives; without one for the rest of the process.
    """
    for name, run in _ON_DEVICE.items():
        (ops or _LIBRARY).impl(name, run, dispatch_key, allow_override=ops is not None)


def _define(signature: str, fake: Function) -> Function:
    flat = re.sub(r"\bScaledCodes (\w+)", r"Tensor \1, Tensor \1_dequant_scale, str \1_kind", signature)
    name = _LIBRARY.define(re.sub(r"\bKind (\w+)", r"str \1", flat), tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"octet::{name}", _packed(fake, _parameter_types(signature)), lib=_LIBRARY)
    op, types = getattr(torch.ops.octet, name).default, _parameter_types(signature)
    if not _OURS & set(types):
        return op

    def call(*arguments: Any) -> Any:
        flat: list[Any] = []
        for argument, parameter_type in zip(arguments, types, strict=True):
            if parameter_type == "ScaledCodes":
                flat += (argument[0], argument[1], argument[2].value)
            else:
                flat.append(argument.value if parameter_type == "Kind" else argument)
        return op(*flat)

    return call


def _parameter_types(signature: str) -> list[str]:
    """The type of each parameter in a signature."""
    parameters = signature[signature.index("(") + 1 : signature.index(") ->")]
    return [parameter.split()[0] for parameter in parameters.split(", ")]


def _packed(run: Function, types: Sequence[str]) -> Function:
    """A function of our types as a function of torch's."""
    if not _OURS & set(types):
        return run

    def packed(*arguments: Any) -> Any:
        remaining, ours = iter(arguments), []
        for parameter_type in types:
            argument = next(remaining)
            if parameter_type == "ScaledCodes":
                argument = ScaledCodes(argument, next(remaining), _KINDS[next(remaining)])
            ours.append(_KINDS[argument] if parameter_type == "Kind" else argument)
        return run(*ours)

    return packed
