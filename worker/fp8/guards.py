"""Guard a layer whose weight may be codes while users and torch cast, copy, save, load or delete it.

An operation that would treat codes as values is done to the decoded values, or raises ValueError
where a module can notice it.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from octet.worker.fp8.casts import KeepsDtypes
from octet.worker.fp8.stored import name_codes, read_weight
from octet.worker.fp8.weights import EncodedWeight, encode_values

_WRAPPERS = {
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.distributed.fsdp": "FSDP",
}
"""Modules of torch that would send or cut codes as if they were values, and what people call them."""


class _PreHooks(OrderedDict[int, Any]):
    """A module's forward pre-hooks. torch's deprecated `weight_norm` asks for them before it takes the weight out."""

    def values(self) -> Any:
        caller = sys._getframe(1)
        if caller.f_globals.get("__name__") == "torch.nn.utils.weight_norm" and caller.f_locals.get("name") == "weight":
            layer = caller.f_locals.get("module")
            if isinstance(layer, GuardedCodes) and layer.weight_dequant_scale is not None:
                _refuse_parametrization(layer.weight.dtype)
        return super().values()


class GuardedCodes(KeepsDtypes):
    """A layer that may hold its `weight` as codes, with a `weight_dequant_scale`.

    has_master: the optimizer has made a master weight. initial_values: the fp32 values for that
    weight, kept until it is made. has_new_codes: codes were loaded since the optimizer's last step.
    whole_residual: where ranks divide the residual, a context that puts it together: all ranks
    enter it together, and inside, `weight_residual` is the whole.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    weight_dequant_scale: Tensor | None
    weight_amax: Tensor | None
    weight_residual: Tensor | None
    initial_values: Tensor | None = None
    has_master: bool = False
    has_new_codes: bool = False
    whole_residual: Callable[[], AbstractContextManager[None]] | None = None

    def __init__(self) -> None:
        super().__init__()
        self._forward_pre_hooks = _PreHooks()

    def plain_tensors(self) -> Iterator[Tensor | None]:
        plain = [self.bias] if self.weight_dequant_scale is not None else [self.weight, self.bias]
        for parameter in plain:
            yield from () if parameter is None else (parameter, parameter.grad)

    def check_residual(self) -> None:
        """Raise ValueError where codes alone would be taken for the values."""
        if self.whole_residual is not None and self.weight_residual is None:
            raise ValueError(
                "the weight's residual is divided over the ranks (ZeRO); allowed: state_dict(), called by all ranks "
                "together, which puts it together. Read the values from there."
            )

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return torch's iterator. Raises ValueError if the weight is codes and the caller is DDP or FSDP.

        DDP reads a gradient before it becomes FP8. FSDP's shards lose the hook and the dtype of the
        gradient without an error.
        """
        if self.weight_dequant_scale is not None:
            _refuse_wrapper(sys._getframe(1).f_globals.get("__name__", ""), self.weight.dtype)
        return super().named_parameters(*args, **kwargs)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute, but not a weight of codes, as torch's parametrizations do: they would compute with the codes."""
        if name == "weight" and self.weight_dequant_scale is not None:
            _refuse_parametrization(self.weight.dtype)
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, but not what pruning makes of a weight of codes (`weight_orig`), before it changes anything."""
        if param is not None and name.startswith("weight_") and self._buffers.get("weight_dequant_scale") is not None:
            _refuse_parametrization(param.dtype)
        super().register_parameter(name, param)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle; codes are not copied for torch's average of weights."""
        if self.weight_dequant_scale is not None:
            _refuse_average_of_codes()
        return super().__reduce_ex__(protocol)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        with nullcontext() if self.whole_residual is None else self.whole_residual():
            super()._save_to_state_dict(destination, prefix, keep_vars)
        name_codes(self, destination, prefix)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str], *rest: Any
    ) -> None:
        """Read what a layer of any level, or a plain one, has saved."""
        holds_codes = self.weight_dequant_scale is not None
        with nullcontext() if self.whole_residual is None else self.whole_residual():
            came_as_values = read_weight(self, state_dict, prefix, self._encode if holds_codes else None)
            self.has_new_codes = self.has_new_codes or prefix + "weight" in state_dict
            super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *rest)
        if came_as_values:
            missing[:] = [name for name in missing if name != prefix + "_extra_state"]

    def _encode(self, values: Tensor) -> EncodedWeight:
        """Values as the layer holds its weight; those of a master weight wait for the optimizer."""
        if self.has_master and values.shape == self.weight.shape:
            self.initial_values = values.detach().to(self.weight.device, torch.float32, copy=True)
        return encode_values(values, self.weight.dtype, has_residual=self.weight_residual is not None)


def _refuse_parametrization(dtype: torch.dtype) -> NoReturn:
    raise ValueError(
        f"a converted layer holds its weight as {dtype} codes, which cannot be parametrized or pruned; allowed: layers that "
        "hold values. Do it before octet.initialize, which then leaves the layer as it is."
    )


def _refuse_wrapper(caller: str, dtype: torch.dtype) -> None:
    for module, name in _WRAPPERS.items():
        if caller.startswith(module):
            raise ValueError(
                f"torch's {name} cannot train a layer whose weight is {dtype} codes; allowed: octet.parallelize. Call "
                "parallelize(model, optimizer, zero_stage=...) after initialize, and leave the wrapper out."
            )


def _refuse_average_of_codes() -> None:
    """Raise ValueError where torch's AveragedModel is making its copy: it would average codes of different scales.

    It copies a model as anyone does, and averages the copy's parameters without a call that a module could see.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is AveragedModel.__init__.__code__:
            raise ValueError(
                "torch's AveragedModel would average FP8 or FP16 codes whose scales differ; allowed: models that hold fp32 "
                "weights. Use octet.AveragedModel, which averages their values and is used alike."
            )
