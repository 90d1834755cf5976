"""The bytes that a model and its optimizer hold, by class, counted from live storage.

Every storage counts once and in full, however many tensors see it and whatever part of it they see.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octet.worker.kernels.torch_private import is_traceable_wrapper_subclass, key_of_storage

CLASSES = ("weights", "master_weights", "gradients", "exp_avg", "exp_avg_sq", "scales", "other")


def memory_report(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, converted_only: bool = False
) -> dict[str, int]:
    """Return bytes by class: weights, master_weights, gradients, exp_avg, exp_avg_sq, scales, other.

    Left out are states that `offload_optimizer` keeps in host memory (see `host_bytes`), a converted layer's port for gradients
    of compiled graphs (4 bytes) and its count of rounded additions (8 bytes), and an optimizer's counter (8 bytes).
    `scales` are all dequant_scales of weights, gradients and states; `other` is the rest of buffers and states.
    converted_only: count only weights that `initialize` converted and the tensors that belong to them, without biases.
    optimizer: may be a wrapper, like those of Accelerate and Lightning. Raises TypeError if it holds no optimizer, or several.
    """
    num_bytes = dict.fromkeys(CLASSES, 0)
    for kind, storage in _storages(model, optimizer, converted_only=converted_only, on_host=False):
        num_bytes[kind] += storage.nbytes()
    return num_bytes


def fp32_report(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes that this rank's weights, live gradients and optimizer states would take in fp32, by class.

    Every value counts once, so there are no master weights. A rank that holds a part of a tensor counts that part.
    """
    optimizer = _unwrapped(optimizer)
    pieces: dict[Tensor, nn.Parameter] = getattr(optimizer, "pieces", {})
    num_elements = dict.fromkeys(("weights", "gradients", "exp_avg", "exp_avg_sq"), 0)
    for parameter in model.parameters():
        piece = pieces.get(parameter, parameter)
        is_whole = any(tensor.untyped_storage().nbytes() for _, tensor in _parts("weights", parameter))
        num_elements["weights"] += (parameter if is_whole else piece).numel()
        holder = parameter if parameter.grad is not None else piece
        num_elements["gradients"] += holder.numel() if holder.grad is not None else 0
        for name in optimizer.state.get(piece, {}):
            if name in num_elements:
                num_elements[name] += piece.numel()
    return {name: 4 * number for name, number in num_elements.items()}


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer within wrappers, each of which has it in one of its attributes."""
    while True:
        held = getattr(optimizer, "__dict__", {}).values()
        inner = {id(each): each for each in held if isinstance(each, torch.optim.Optimizer)}
        if not inner and isinstance(optimizer, torch.optim.Optimizer):
            return optimizer
        if len(inner) != 1:
            raise TypeError(
                f"optimizer: got a {type(optimizer).__name__} that holds {len(inner)} optimizers; allowed: a "
                "torch.optim.Optimizer, a wrapper of one, or None. Pass the optimizer that initialize returned."
            )
        [optimizer] = inner.values()


def host_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Return the bytes that model and optimizer hold in host memory for parameters on other devices. 0 for a model on a CPU."""
    return sum(storage.nbytes() for _, storage in _storages(model, optimizer, converted_only=False, on_host=True))


def _storages(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, *, converted_only: bool, on_host: bool
) -> Iterator[tuple[str, torch.UntypedStorage]]:
    """Yield each storage once, with its class. on_host: those in host memory while parameters are not; else all others."""
    trains_on_host = all(parameter.device.type == "cpu" for parameter in model.parameters())
    seen: set[int] = set()
    for kind, tensor in held_tensors(model, optimizer, converted_only=converted_only):
        storage = tensor.untyped_storage()
        is_on_host = not trains_on_host and tensor.device.type == "cpu"
        if is_on_host == on_host and key_of_storage(storage) not in seen:  # not the address: fake tensors have none
            seen.add(key_of_storage(storage))
            yield kind, storage


def held_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, converted_only: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield every plain tensor that model and optimizer hold, with its class, wherever it lies."""
    optimizer = None if optimizer is None else _unwrapped(optimizer)
    pieces: dict[Tensor, nn.Parameter] = getattr(optimizer, "pieces", {})
    residuals: dict[Tensor, Tensor] = getattr(optimizer, "own_residuals", {})
    parameters, buffers = _converted(model) if converted_only else (model.parameters(), model.named_buffers())
    for parameter in parameters:
        yield from _parts("weights", parameter)
        yield from _parts("gradients", parameter.grad)
        piece = pieces.get(parameter, parameter)
        if piece is not parameter:
            yield from _parts("weights", piece)  # of its own memory at ZeRO stage 3, else the parameter's
            yield from _parts("gradients", piece.grad)
            yield from _parts("master_weights", residuals.get(piece))
        state = optimizer.state.get(piece, {}) if optimizer is not None else {}
        for name, value in state.items():
            yield from _parts(name if name in CLASSES else "other", value)
    for name, buffer in buffers:
        yield from _parts(_buffer_class(name), buffer)


def _converted(model: nn.Module) -> tuple[list[nn.Parameter], list[tuple[str, Tensor]]]:
    report: Any = model.octet_report
    layers = [model.get_submodule(name) for name in report.converted]
    weights = [layer.get_parameter("weight") for layer in layers]
    return weights, [buffer for layer in layers for buffer in layer.named_buffers()]


def _buffer_class(name: str) -> str:
    if name.endswith("dequant_scale"):
        return "scales"
    return "master_weights" if name.endswith("residual") else "other"


def _parts(kind: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors inside a wrapper, dataclass or dict. A part with "scale" in its name has class `scales`.

    A weight of codes names the classes of its parts itself.
    """
    if hasattr(value, "tensors_by_class"):
        yield from value.tensors_by_class()
        return
    is_wrapper = is_traceable_wrapper_subclass(value)
    if isinstance(value, Tensor) and not is_wrapper:
        yield kind, value
    for name, part in _members(value):
        yield from _parts("scales" if "scale" in name else kind, part)


def _members(value: Any) -> list[tuple[str, Any]]:
    if is_traceable_wrapper_subclass(value):
        return [(name, getattr(value, name)) for name in value.__tensor_flatten__()[0]]
    if isinstance(value, dict):
        return list(value.items())
    if is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return []
