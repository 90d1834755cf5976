"""Refuse what torch would do to a weight of codes as if they were values, where a module can notice."""

import sys
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


class GuardedCodes(nn.Module):
    """A module that may hold its `weight` as codes, with a `weight_dequant_scale`."""

    weight: nn.Parameter
    weight_dequant_scale: Tensor | None

    def __delattr__(self, name: str) -> None:
        """Delete an attribute, but not a weight of codes, as torch's parametrizations do: they would compute with the codes."""
        if name == "weight" and self.weight_dequant_scale is not None:
            raise ValueError(
                f"a converted layer holds its weight as {self.weight.dtype} codes, which cannot be parametrized or pruned; "
                "allowed: layers that hold values. Do it before octet.initialize, which then leaves the layer as it is."
            )
        super().__delattr__(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle; codes are not copied for torch's average of weights."""
        if self.weight_dequant_scale is not None:
            _refuse_average_of_codes()
        return super().__reduce_ex__(protocol)


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
