"""Give a model that was converted and divided without values its values, one parameter at a time.

Each parameter's values are made whole, in the whole model's order, encoded as the level holds them with the scale of the whole,
and cut to what this rank keeps: its pieces (ZeRO), its shard (tensor degree), or nothing (another stage of a pipeline). So a
rank never holds more than its own share and the largest parameter in fp32. The bits are those of a model that was made whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from octet.worker.common.deferred import allocate, is_deferred
from octet.worker.fp8.convert import ConversionReport
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.recipe import E4M3
from octet.worker.fp8.weight import stored, tensors_in_memory
from octet.worker.fp8.weights import amax_of, encode_values
from octet.worker.metrics.memory import memory_report
from octet.worker.optim import LowBitOptimizer
from octet.worker.optim.sharding import allocate_states, make_master, state_bytes
from octet.worker.parallel.parallel import Parallel
from octet.worker.parallel.strategy import replicas_by_tensor


@dataclass(frozen=True)
class Unfilled:
    """A parameter of the whole model that waits for its values. names: several if it is tied."""

    names: tuple[str, ...]
    shape: torch.Size


class Values(Protocol):
    """The source of a whole model's values. Each parameter is read or skipped once, in the order of `unfilled`."""

    @property
    def unfilled(self) -> Sequence[Unfilled]:
        """The parameters that have no values yet."""

    def read(self, parameter: Unfilled) -> Tensor:
        """Return a parameter's whole values on the device where the model trains."""

    def scale_of(self, parameter: Unfilled) -> Tensor | None:
        """Return the scale, fp32 (), at which a parameter's values are E4M3 codes without rounding; None if unknown."""

    def skip(self, parameter: Unfilled) -> None:
        """Pass over a parameter that this rank does not hold."""


def unfilled_parameters(model: nn.Module) -> list[Unfilled]:
    """List the parameters of a whole model in its order, ties once."""
    names_of: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    return [Unfilled(tuple(names), parameter.shape) for parameter, names in names_of.items()]


_LATER: WeakKeyDictionary[nn.Module, tuple[Values, list[RemovableHandle]]] = WeakKeyDictionary()
"""The values of models that `parallelize` divides first, and the hooks that refuse their use until then."""


def fill_later(model: nn.Module, values: Values) -> None:
    """Keep a model's values for `parallelize`. Until then its forward pass and its state dict raise RuntimeError."""

    def refuse(*_: Any) -> NoReturn:
        raise RuntimeError(
            "the model has no values yet: load_pretrained with by_shard=True and draw_model leave them to its division. Call "
            "octet.parallelize(model, optimizer, …), by which each rank reads or draws its share."
        )

    _LATER[model] = values, [model.register_forward_pre_hook(refuse), model.register_state_dict_pre_hook(refuse)]


def waits_for_values(model: nn.Module) -> bool:
    """Return True for a model that `fill_later` has got and `fill_now` has not."""
    return model in _LATER


def fill_now(parallel: Parallel) -> None:
    """Give each rank its share of the values that `fill_later` has kept, and let the model be used. Raises DoesNotFit."""
    values, refusals = _LATER[parallel.model]
    assert isinstance(parallel.optimizer, LowBitOptimizer)  # `load_pretrained` has checked it
    materialize(parallel.model, parallel.optimizer, parallel, values)
    del _LATER[parallel.model]
    for refusal in refusals:
        refusal.remove()


class DoesNotFit(MemoryError):
    """This rank's share of a model, with the largest parameter, does not fit into memory."""


@torch.no_grad()
def materialize(model: nn.Module, optimizer: LowBitOptimizer, parallel: Parallel, values: Values) -> None:
    """Fill what this rank holds of a model, and make its optimizer's states. All ranks call it together.

    Ranks that hold the same get the first one's whole parameters and buffers.
    Raises DoesNotFit, with the memory that it takes.
    """
    held = dict(model.named_parameters(remove_duplicate=False))
    in_codes = {
        f"{name}.weight".removeprefix("."): layer
        for name, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, Float8Linear) and layer.encoded is not None
    }
    fill, num_held = _Fill(optimizer, parallel), 0
    try:
        allocate_states(optimizer)
        for parameter in values.unfilled:
            name = next((name for name in parameter.names if name in held), None)
            if name is None:
                values.skip(parameter)
            elif (layer := in_codes.get(name)) is not None:
                fill.codes(layer.encoded, values.read(parameter), values.scale_of(parameter))
            else:
                fill.plain(held[name], values.read(parameter))
            num_held += name is not None
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        raise DoesNotFit(_explained(model, optimizer, parallel, values, num_held)) from error
    left = [name for name, parameter in held.items() if is_deferred(stored(parameter))]
    assert not left, f"no values for {left}"
    divided = {stored(parameter) for parameter in model.parameters() if not parallel.holds_whole(parameter)}
    apart = replicas_by_tensor(parallel.parts)
    for tensor in tensors_in_memory(model):
        if tensor not in divided:
            apart.get(tensor, parallel.replicas).broadcast_(tensor)
    report = model.octet_report
    assert isinstance(report, ConversionReport)
    model.octet_report = report.completed(memory_report(model, optimizer), report.health)  # type: ignore[assignment]


def _is_out_of_memory(error: Exception) -> bool:
    """Return True if an allocation failed; torch's allocator on the CPU has no class of its own for it."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


class _Fill:
    """Puts whole values where this rank holds its part of them."""

    def __init__(self, optimizer: LowBitOptimizer, parallel: Parallel) -> None:
        self.optimizer, self.parallel = optimizer, parallel

    def plain(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """Fill a parameter that is held as values."""
        self._put(parameter, self.parallel.own_values(parameter, whole))

    def codes(self, parameter: Any, whole: Tensor, dequant_scale: Tensor | None) -> None:
        """Fill a `Float8Weight`: its codes, its scale, and its residual or master weight.

        dequant_scale: at which the values are E4M3 codes already, if they are.
        """
        amax, own_residual = amax_of(whole), parameter.state.own_residual
        own = self.parallel.own_values(parameter, whole).contiguous()
        stepped, elements = self.parallel.piece_of(parameter)
        weight = self.optimizer.quantized.get(stepped)
        is_whole = is_deferred(parameter.codes) or parameter.residual is not None  # else codes and residual are pieces
        encoded_part = own if is_whole else own.view(-1)[elements.start : elements.stop]
        has_residual = parameter.residual is not None or own_residual is not None
        dtype = parameter.codes.dtype
        known = dequant_scale if dtype == E4M3 else None
        encoded = encode_values(encoded_part, dtype, has_residual=has_residual, amax=amax, dequant_scale=known)
        parameter.dequant_scale.copy_(encoded.dequant_scale)
        parameter.values_amax.copy_(amax)
        self._put(parameter, encoded.codes, is_piece=not is_whole)
        if parameter.residual is not None:
            assert encoded.residual is not None
            allocate(parameter.residual).copy_(encoded.residual)
        elif own_residual is not None:
            assert encoded.residual is not None
            flat = encoded.residual.view(-1)
            own_residual.copy_(flat[elements.start : elements.stop] if is_whole else flat)
        if weight is not None and weight.needs_master and stepped.requires_grad:
            values = own.view(-1)[elements.start : elements.stop].float()
            make_master(self.optimizer, stepped, values, amax)

    def _put(self, parameter: nn.Parameter, values: Tensor, *, is_piece: bool = False) -> None:
        """Write what a rank holds of a parameter. is_piece: the values are those of its piece alone, flat."""
        held = stored(parameter)
        if is_deferred(held):
            allocate(held).copy_(values)
            return
        piece, elements = self.parallel.piece_of(parameter)
        stored(piece).copy_(values if is_piece else values.reshape(-1)[elements.start : elements.stop])


def needed_bytes(model: nn.Module, optimizer: LowBitOptimizer, parallel: Parallel) -> int:
    """Return the bytes that this rank holds of a divided model for good: weights, master weights, states; no gradients."""
    total = sum(tensor.nbytes for tensor in tensors_in_memory(model))
    total -= sum(stored(parameter).nbytes for parameter in model.parameters())
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in model.parameters():
        stepped, elements = parallel.piece_of(parameter)
        num_held = parameter.numel() if parallel.holds_whole(parameter) else len(elements)
        total += num_held * stored(parameter).element_size()
        weight = optimizer.quantized.get(stepped)
        if weight is not None and weight.weight.state.own_residual is not None:
            total += weight.weight.state.own_residual.nbytes
        if weight is not None and weight.needs_master:
            total += len(elements) * torch.float16.itemsize
        if stepped in groups:
            total += state_bytes(optimizer, stepped, groups[stepped])
    return total


def _explained(model: nn.Module, optimizer: LowBitOptimizer, parallel: Parallel, values: Values, num_held: int) -> str:
    share = needed_bytes(model, optimizer, parallel)
    largest = max(parameter.shape.numel() for parameter in values.unfilled) * torch.float32.itemsize
    axes = f"{parallel.replicas.size} data, {parallel.axes.tensor.size} tensor"
    return (
        f"the model does not fit: this rank's share of weights and optimizer states takes {share / 2**30:.2f} GiB, and the "
        f"largest parameter {largest / 2**30:.2f} GiB while it is made; memory ended after {num_held} of "
        f"{sum(1 for _ in model.parameters())} parameters. Use more ranks ({axes} ranks divide each stage), a higher "
        "zero_stage, tensor or pipeline degree, or a level with fewer bytes."
    )
