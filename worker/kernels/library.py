"""Register our kernels as ops of torch, `torch.ops.octet.*`: one op for all devices, each device with its implementation.

torch.library chooses by dispatch key: `reference.py` on a CPU, `octet.worker.kernels.cuda` on a
CUDA device, loaded at the first call with a tensor there (registering loads no Triton). A graph of
torch.compile holds the ops as they are. Eager code on a CUDA device, and the code that Inductor
writes for a block's graph, call the implementation directly, unless a mode, a transform or autograd
has to see the op. Ops take tensors, numbers and strings; our functions take types of `scales.py`
too. Only this file translates (`_TRANSLATIONS`): in a signature `Kind kind` stands for `str kind`,
`ScaledCodes a` for `Tensor a, Tensor a_dequant_scale, str a_kind`.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from operator import attrgetter
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octet.worker.kernels import reference
from octet.worker.kernels.scales import LinearFormats, Operand, Operands, ScaledCodes, ScaleKind
from octet.worker.kernels.torch_private import (
    num_dispatch_modes,
    num_function_modes,
    present_transform,
    schema_of,
    write_in_graphs,
)

Function = Callable[..., Any]


class _Translation(NamedTuple):
    """A type of ours in a signature. schema: what torch sees, {0} being the parameter's name.

    width: the number of torch's arguments. flatten: makes them. pack: makes the type of them.
    """

    schema: str
    width: int
    flatten: Callable[[Any], tuple[Any, ...]]
    pack: Function


_KINDS = {kind.value: kind for kind in ScaleKind}
_OPERAND = "{0}, Tensor? {0}_dequant_scale, Tensor? {0}_amax"
_TRANSLATIONS = {
    "Kind": _Translation("str {0}", 1, lambda kind: (kind.value,), lambda value: _KINDS[value]),
    "LinearFormats": _Translation("str {0}", 1, lambda formats: (formats.text,), LinearFormats.parse),
    "ScaledCodes": _Translation(
        "Tensor {0}, Tensor {0}_dequant_scale, str {0}_kind",
        3,
        lambda quantized: (quantized[0], quantized[1], quantized[2].value),
        lambda codes, scale, kind: ScaledCodes(codes, scale, _KINDS[kind]),
    ),
    "Operands": _Translation(
        "Tensor[] {0}, Tensor[] {0}_dequant_scales, Tensor[] {0}_amaxes",
        3,
        lambda operands: (operands[0], operands[1], operands[2]),
        Operands,
    ),
    "Operand": _Translation(f"Tensor {_OPERAND}", 3, lambda operand: (operand[0], operand[1], operand[2]), Operand),
    "Operand?": _Translation(
        f"Tensor? {_OPERAND}",
        3,
        lambda operand: (None, None, None) if operand is None else (operand[0], operand[1], operand[2]),
        lambda data, scale, amax: None if data is None else Operand(data, scale, amax),
    ),
}
_LIBRARY = torch.library.Library("octet", "FRAGMENT")
_is_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
runs_directly: Callable[[Tensor], bool] = attrgetter("is_cuda")
"""Return True for a tensor on a device where eager code calls our implementations without torch's dispatcher."""
_CACHED_APART = "octet-direct"
"""Part of the key by which torch caches graphs: a process finds none that call the ops in the other way."""
_ON_DEVICE: dict[str, Function] = {}
"""By the op's name, what runs the Triton implementation."""


def define(
    signature: str,
    fake: Function,
    *,
    twins: ModuleType = reference,
    compose: Callable[[Any], Function] | None = None,
) -> Function:
    """Register `reference.NAME` and `cuda.NAME` as the op `octet::NAME`; returns the function that calls the op.

    signature: of torch.library, with the types of `_TRANSLATIONS`. fake: the shapes, strides and dtypes of the results, for
    a compiler. twins: the module in the place of `reference`. compose: makes the op of either module's functions, where it
    is not a function of the module itself. Results are new tensors; callers have checked the arguments.
    """
    name = signature.partition("(")[0]
    types = _parameter_types(signature)

    def made_of(module: ModuleType) -> Function:
        function: Function = getattr(module, name) if compose is None else compose(module)
        return function

    @cache
    def implementation() -> Function:
        return made_of(import_module("octet.worker.kernels.cuda"))

    def on_device(*arguments: Any) -> Any:
        return implementation()(*arguments)

    _ON_DEVICE[name] = _packed(on_device, types)
    call = _define(signature, fake)
    _LIBRARY.impl(name, _packed(made_of(twins), types), "CPU")
    _LIBRARY.impl(name, _ON_DEVICE[name], "CUDA")
    _let_graphs_call(name)

    def call_directly(*arguments: Any) -> Any:
        return (implementation() if _needs_no_dispatcher(arguments[0]) else call)(*arguments)

    return call_directly


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


def call_directly_in_graphs() -> None:
    """Let graphs that Inductor makes from now on call our implementations without torch's dispatcher, as eager code does.

    Not of ops that write or have defaults: their arguments come by name, or not at all.
    """
    if _CACHED_APART not in torch.compiler.config.cache_key_tag:
        torch.compiler.config.cache_key_tag += _CACHED_APART
    for name in _ON_DEVICE:
        op = getattr(torch.ops.octet, name).default
        schema = schema_of(op)
        if not schema.is_mutable and not any(argument.has_default_value() for argument in schema.arguments):
            write_in_graphs(op, f"torch.ops.octet.{name}.directly")


def _let_graphs_call(name: str) -> None:
    """Give an op what the code of a graph calls: `torch.ops.octet.NAME.directly`, with the op's arguments."""
    op, run = getattr(torch.ops.octet, name), _ON_DEVICE[name]
    through_dispatcher = op.default

    def directly(*arguments: Any) -> Any:
        return (run if _needs_no_dispatcher(arguments[0]) else through_dispatcher)(*arguments)

    op.directly = directly


def _needs_no_dispatcher(first: Any) -> bool:
    """Return True if all that torch's dispatcher would do is to call the implementation of CUDA devices.

    The dispatcher costs as much as a launch. first: the op's first argument.
    """
    if type(first) is not Tensor and isinstance(first, (tuple, list)) and first:
        first = first[0]
    return (
        type(first) is Tensor
        and not _is_compiling()
        and runs_directly(first)
        and not (first.requires_grad and _is_grad_enabled())
        and not num_dispatch_modes()
        and not num_function_modes()
        and present_transform() is None
    )


def _define(signature: str, fake: Function) -> Function:
    types = _parameter_types(signature)
    name = _LIBRARY.define(_torch_schema(signature), tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"octet::{name}", _packed(fake, types), lib=_LIBRARY)
    op = getattr(torch.ops.octet, name).default
    if _TRANSLATIONS.keys().isdisjoint(types):
        return op

    def call(*arguments: Any) -> Any:
        flat: list[Any] = []
        for argument, parameter_type in zip(arguments, types, strict=True):
            translation = _TRANSLATIONS.get(parameter_type)
            flat += (argument,) if translation is None else translation.flatten(argument)
        return op(*flat)

    return call


def _torch_schema(signature: str) -> str:
    """The signature with the types that torch knows."""
    start, end = signature.index("(") + 1, signature.index(") ->")
    parameters = []
    for parameter in signature[start:end].split(", "):
        parameter_type, _, name = parameter.partition(" ")
        translation = _TRANSLATIONS.get(parameter_type)
        parameters.append(parameter if translation is None else translation.schema.format(name))
    return signature[:start] + ", ".join(parameters) + signature[end:]


def _parameter_types(signature: str) -> list[str]:
    """The type of each parameter in a signature."""
    parameters = signature[signature.index("(") + 1 : signature.index(") ->")]
    return [parameter.split()[0] for parameter in parameters.split(", ")]


def _packed(run: Function, types: Sequence[str]) -> Function:
    """A function of our types as a function of torch's."""
    translations = [_TRANSLATIONS.get(parameter_type) for parameter_type in types]
    if not any(translations):
        return run

    places: list[tuple[int | slice, Function | None]] = []
    num_flat = 0
    for translation in translations:
        if translation is None:
            places.append((num_flat, None))
            num_flat += 1
        else:
            places.append((slice(num_flat, num_flat + translation.width), translation.pack))
            num_flat += translation.width

    def packed(*arguments: Any) -> Any:
        return run(*[arguments[place] if pack is None else pack(*arguments[place]) for place, pack in places])

    return packed
