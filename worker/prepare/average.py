"""Average the weights of a converted model (EMA, SWA) by their values, since codes differ in their scales.

ema = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
optimizer.step(); ema.update_parameters(model)
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from octet.worker.fp8.bf16 import HalfLinear
from octet.worker.fp8.fsdp import is_shard, values_of_shard
from octet.worker.fp8.layout import layout_of
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.stored import drop_history
from octet.worker.prepare.export_state_dict import Reader, reader_of


class AveragedModel(swa_utils.AveragedModel):
    """`torch.optim.swa_utils.AveragedModel` for a converted model, or any other.

    `module` is a copy that holds the averages: weights stored as codes are averaged, and held, in fp32 (4 bytes a parameter),
    all others in their own dtype. It computes as the model does, and its layers are named as the model's are.

    Where ranks are to divide the model (`parallelize`, FSDP2), make the average first: it stays whole, and `update_parameters`
    gathers one parameter at a time. Under FSDP2, `module` may be divided by `fully_shard` as the model is.
    """

    _has_begun = False
    """True if an average was taken, and none was loaded since: then the host does not read `n_averaged`."""

    def __init__(
        self,
        model: nn.Module,
        device: int | torch.device | None = None,
        avg_fn: Callable[[Tensor, Tensor, Tensor | int], Tensor] | None = None,
        multi_avg_fn: Callable[[Any, Any, Tensor | int], None] | None = None,
        use_buffers: bool = False,
    ) -> None:
        """Arguments as torch's. multi_avg_fn: called with one parameter at a time.

        ValueError for two averaging functions, and for a model that ranks divide so that it has no copy. TypeError for a decay
        in the place of the device.
        """
        if isinstance(device, float):
            raise TypeError(
                f"device is {device}; allowed: a torch.device, a device's number or None. To average with a decay, pass "
                f"multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn({device})."
            )
        if avg_fn is not None and multi_avg_fn is not None:
            raise ValueError("got both avg_fn and multi_avg_fn; allowed: one of them. Leave one out.")
        nn.Module.__init__(self)  # torch's own would copy the codes
        self.module = _copy(model)
        for layer in list(self.module.modules()):
            if isinstance(layer, Float8Linear):
                layer.hold_values()
        if device is not None:
            self.module = self.module.to(device)
        self.register_buffer("n_averaged", torch.tensor(0, dtype=torch.long, device=device))
        self.avg_fn, self.multi_avg_fn, self.use_buffers = avg_fn, multi_avg_fn, use_buffers

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load an average of any level: what its converted layers remember is left out where this model's are plain."""
        state = dict(state_dict)
        for name, layer in self.named_modules(remove_duplicate=False):
            if layout_of(layer) is not None and not isinstance(layer, (Float8Linear, HalfLinear)):
                drop_history(state, f"{name}.")
        return super().load_state_dict(state, strict, assign)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self._has_begun = False

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Take the present values into the average; the first call copies them. One weight at a time is decoded.

        Where ranks divide the model, they call it together. ValueError for a model with other parameters than the average has.
        """
        is_first = not self._has_begun and bool(self.n_averaged == 0)
        reader = reader_of(model)
        held, given = ([*each.parameters(), *each.buffers()] for each in (self.module, model))
        # The count stays where the average is: each copy of a number of the host would wait for the device.
        if held and self.n_averaged.device != held[0].device:
            self.n_averaged = self.n_averaged.to(held[0].device)
        num_averaged = self.n_averaged
        if len(held) != len(given):
            raise ValueError(
                f"the model has {len(given)} parameters and buffers, and its average {len(held)}; allowed: the model that the "
                "average is a copy of. Where stages divide it (pipeline), average each stage, a copy of its own module."
            )
        for averaged, present in zip(held, given, strict=True):
            value = _values(present, reader, averaged).to(averaged.device)
            is_averaged = not is_first and (self.use_buffers or isinstance(averaged, nn.Parameter))
            if not is_averaged:
                averaged.copy_(value)
            elif self.multi_avg_fn is not None:
                self.multi_avg_fn([averaged.detach()], [value], num_averaged.to(averaged.device))
            else:
                average = self.avg_fn or swa_utils.get_swa_avg_fn()
                averaged.copy_(average(averaged.detach(), value, num_averaged.to(averaged.device)))
        self.n_averaged += 1
        self._has_begun = True


def _copy(model: nn.Module) -> nn.Module:
    """Copy a model. Raises ValueError where ranks hold parts of it that a copy would lack."""
    if any(is_shard(parameter) for parameter in model.parameters()):
        raise ValueError("the model is divided by FSDP2; allowed: a model before fully_shard. Make the average before it.")
    try:
        return deepcopy(model)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the model has no copy ({error}); allowed: a model before parallelize. Make the average before it."
        ) from error


def _values(present: Tensor, reader: Reader, averaged: Tensor) -> Tensor:
    """Return the present values of what the average holds of a parameter or buffer: all of it, or this rank's shard."""
    if not isinstance(present, nn.Parameter):
        return present.detach()
    value = values_of_shard(present) if is_shard(averaged) else reader.values(present)
    if value.shape != averaged.shape:
        raise ValueError(
            f"a parameter has shape {tuple(value.shape)} and its average {tuple(averaged.shape)}; allowed: the model that the "
            "average is a copy of. Make the average before parallelize."
        )
    return value
