"""Export what was trained as a state dict with the names and values of a plain model, for any other program."""

from collections.abc import Iterator, Set
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from octet.worker.fp8.fsdp import holds_codes, is_shard, put_shards_back, whole_values
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.loss_scaling import STATE_BUFFER
from octet.worker.fp8.operand import OperandScaling
from octet.worker.fp8.stacks import Stack, stack_entries, stacks_of
from octet.worker.fp8.stored import make_plain
from octet.worker.fp8.weight import Float8Weight


def plain_state_dict(model: nn.Module, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The state dict that the model would have without `initialize`: weights are values.

    Where ranks divide the model (`parallelize`), all ranks call it together, and each gets the whole. dtype: of the weights
    that are held as codes, which are new tensors; what is held as values keeps its dtype.
    """
    return dict(plain_tensors(model, dtype=dtype))


def plain_tensors(
    model: nn.Module, *, dtype: torch.dtype = torch.float32, leave_out: Set[str] = frozenset()
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of `plain_state_dict`; a weight is decoded, or gathered, when its turn comes.

    leave_out: names of the model, those of a stack by matrix.
    """
    put_shards_back(model)
    reader, waiting = reader_of(model), dict[Stack, list[Tensor]]()
    stacks = {part: stack for stack in stacks_of(model) if not leave_out.intersection(stack.parts) for part in stack.parts}
    # No variable holds values while the next are decoded.
    for name, held in held_names(model).items():
        if name in leave_out:
            continue
        if (stack := stacks.get(name)) is None:
            yield name, _plain_values(held, reader, dtype)
            continue
        waiting.setdefault(stack, []).append(_plain_values(held, reader, dtype))
        if len(waiting[stack]) == len(stack.parts):
            own = stack.joined(waiting.pop(stack))
            yield stack.name, reader.stack(own) if stack.is_divided else own


def _plain_values(held: Tensor, reader: "Reader", dtype: torch.dtype) -> Tensor:
    if not isinstance(held, nn.Parameter):
        return held.detach()
    return reader.values(held).to(dtype) if holds_codes(held) else reader.values(held)


def held_names(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and persistent buffers by their names in a plain state dict, in its order."""
    held: dict[str, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, OperandScaling):
            continue
        own = {name: buffer for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set}
        for name, tensor in (module._parameters | own).items():
            if tensor is not None and join(prefix, name) != STATE_BUFFER:
                held[join(prefix, name)] = tensor
    return held


class Reader(Protocol):
    """Reads whole parameters of a model. Where ranks divide it, all ranks call each method together."""

    def values(self, parameter: Tensor) -> Tensor:
        """Return a parameter's values, as precisely as the ranks hold them: fp32 of codes, else in its dtype."""

    def codes(self, weight: Float8Weight) -> Tensor:
        """Return a weight's codes."""

    def stack(self, own: Tensor) -> Tensor:
        """Return the matrices of all ranks, given this rank's of a stack that the ranks divide."""


class OwnParameters:
    """Reads the parameters of a model that this process holds whole."""

    def values(self, parameter: Tensor) -> Tensor:
        """Return the values; those of a shard of FSDP2 are put together, by all ranks together."""
        if is_shard(parameter):
            return whole_values(parameter)
        return parameter.dequantize() if type(parameter) is Float8Weight else parameter.detach()

    def codes(self, weight: Float8Weight) -> Tensor:
        """Return the codes."""
        return weight.codes.detach()

    def stack(self, own: Tensor) -> Tensor:
        """Return the matrices that this process holds."""
        return own


_READERS: WeakKeyDictionary[nn.Module, Reader] = WeakKeyDictionary()


def reader_of(model: nn.Module) -> Reader:
    """Return what reads a model's parameters: over ranks, where `parallelize` has divided it."""
    return _READERS.get(model) or OwnParameters()


def set_reader(model: nn.Module, reader: Reader) -> None:
    """Let a model, and each module of it, be read through ranks. A copy of the model does not inherit it."""
    _READERS.update(dict.fromkeys(model.modules(), reader))


def as_plain(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """A state dict of an initialized model in the names and values of a plain one; one that is plain already is copied."""
    plain = dict(state)
    plain.pop(STATE_BUFFER, None)
    for name, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, Float8Linear):
            make_plain(plain, join(name, ""))
    stack_entries(model, plain)
    return plain


class PlainSaving:
    """Takes the place of a transformers model's `save_pretrained`: what it writes, `from_pretrained` loads as a plain model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, save_directory: Any, *args: Any, state_dict: dict[str, Any] | None = None, **options: Any) -> Any:
        held = self.model.state_dict() if state_dict is None else state_dict
        save: Any = type(self.model).save_pretrained
        return save(self.model, save_directory, *args, state_dict=as_plain(self.model, held), **options)


def save_plainly(model: nn.Module) -> None:
    """Let `save_pretrained`, where a model has it, write values instead of codes."""
    if callable(getattr(model, "save_pretrained", None)):
        model.save_pretrained = PlainSaving(model)  # type: ignore[assignment]


def join(name: str, attribute: str) -> str:
    """The full name of a module's attribute; the root module's name is empty."""
    return f"{name}.{attribute}" if name else attribute
